"""Published versions are kept: the newest two, and only what is whole is read."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from cloud_learner.buffer.files import TEMPORARY
from cloud_learner.training.publishing.published_file import keep_file, read_kept
from wire.errors import StorageError


def version(number):
    data = np.random.default_rng(number).integers(0, 256, 1000, np.uint8)
    return number, hashlib.sha256(data.data).hexdigest(), data


def test_the_newest_two_are_kept_by_their_numbers(tmp_path):
    (tmp_path / "weights of mine.safetensors").write_bytes(b"kept")
    for number in (9, 10, 11):
        keep_file(tmp_path, *version(number))
    assert read_kept(tmp_path, *version(9)[:2]) is None
    for number in (10, 11):
        assert np.array_equal(read_kept(tmp_path, *version(number)[:2]), version(number)[2])
    assert len(list(tmp_path.iterdir())) == 3


def test_what_was_left_half_written_goes(tmp_path):
    (tmp_path / f"3-{'0' * 64}.safetensors{TEMPORARY}").write_bytes(b"half")
    keep_file(tmp_path, *version(4))
    keep_file(tmp_path, *version(4))
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_damaged_or_leads_elsewhere_is_not_there(tmp_path, caplog):
    number, sha256, data = version(1)
    keep_file(tmp_path, number, sha256, data)
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path.parent / "elsewhere")
    path.symlink_to(tmp_path.parent / "elsewhere")
    assert read_kept(tmp_path, number, sha256) is None
    path.unlink()
    path.write_bytes(b"other")
    assert read_kept(tmp_path, number, sha256) is None
    assert caplog.text.count("The next version travels whole.") == 2


def test_a_directory_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        keep_file(tmp_path / "file", *version(1))
