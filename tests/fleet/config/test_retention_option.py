"""What the buffer forgets by itself, from a recipe or an option to the gateway's thread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cloud_learner.buffer.maintenance.retention import Bound, Retention
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides, read_retention
from fleet.config.process_options import UpOptions
from fleet.config.recipes import get_recipe
from fleet.launch import factories
from fleet.launch.process_specs import ProcessSpecs
from wire.errors import ConfigError
from wire.transport.memory_channel import MemoryServer

TEXT = '{"max_bytes": 2e11, "by_task": {"push": {"max_age_s": 60}}, "drop_outcomes": ["aborted"]}'
SAID = Retention(max_bytes=2e11, by_task={"push": Bound(max_age_s=60)}, drop_outcomes=("aborted",))


def test_it_is_said_as_json_or_in_a_file(tmp_path: Path) -> None:
    usual = get_recipe("fake").retention
    assert not usual.bounded and read_retention("", usual) is usual
    assert read_retention(TEXT, usual) == SAID
    file = tmp_path / "retention.json"
    file.write_text(TEXT)
    assert read_retention(str(file), usual) == SAID


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_byte": 1}', r"--retention: .*max_byte.* It may say: max_bytes, max_age_s, by_task"),
        ('{"by_task": {"push": {"max_bytes": "20G"}}}', r"--retention: Expected `float \| null`, got `str`"),
        ('{"max_age_s": -3}', "max_age_s -3 is negative"),
        ("nowhere.json", "Give JSON, or a file of JSON or TOML"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpOptions(retention=text).check()


def test_up_hands_it_to_the_gateway_and_the_gateway_to_its_thread(tmp_path: Path) -> None:
    parts = ProcessSpecs("fake", "tcp://127.0.0.1:1", 0, True, Overrides())
    words = parts.make_gateway("", 1, "", 2, TEXT).argv
    assert words[words.index("--retention") + 1] == TEXT
    assert "--retention" not in parts.make_gateway("", 1, "", 2).argv
    recipe = replace(get_recipe("fake"), retention=SAID)
    *_, ledger, maintenance = factories.make_gateway(recipe, DataDirectory(tmp_path), MemoryServer())
    assert maintenance._retention == SAID
    ledger.close()
