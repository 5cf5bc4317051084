import json

import msgspec
import pytest
import torch
from torch import nn

from policies.common.weights import Header, load_into, pack, read_header, unpack
from wire.errors import WeightsError


@pytest.fixture
def header(blind):
    return Header(network="test", config={"width": 3}, spec=blind, spec_hash=blind.hash)


def test_round_trip_is_exact(header):
    tensors = {"b": torch.randn(3, 2), "a": torch.arange(4)}
    data = pack(tensors, header)
    back_header, back = unpack(data)
    assert back_header == header
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert pack(back, back_header) == data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "torn one"),
        (b"\x80\x04\x95", "pickle"),
        (b"PK\x03\x04....", "pickle or a torch archive"),
        (b"\xff" * 100, "torn one"),
        ((8).to_bytes(8, "little") + b"nonsense", "cannot be read"),
        ((2).to_bytes(8, "little") + b"{}", "without 'vla_fleet' metadata"),
        ((4).to_bytes(8, "little") + b"[[]]", "cannot be read"),
    ],
)
def test_what_is_no_weights_file_is_refused_with_a_remedy(data, says):
    with pytest.raises(WeightsError, match=says) as error:
        unpack(data)
    assert "save()" in str(error.value)


def test_a_header_whose_length_begins_like_a_pickle_or_an_archive_is_read(header):
    firsts = set()
    for length in (*range(0, 280, 8), 19280 - 900, 19280):
        padded = msgspec.structs.replace(header, config={"width": "x" * length})
        data = pack({"a": torch.zeros(1)}, padded)
        firsts.add(data[:1])
        assert read_header(data) == padded
    assert b"\x80" in firsts
    spare = 0x4B50 - int.from_bytes(pack({"a": torch.zeros(1)}, header)[:8], "little")
    archive_like = [
        pack({"a": torch.zeros(1)}, msgspec.structs.replace(header, config={"width": 3, "more": "x" * length}))
        for length in range(spare - 40, spare)
    ]
    assert any(data[:2] == b"PK" for data in archive_like)
    for data in archive_like:
        read_header(data)


def test_every_cut_of_a_file_is_refused(header):
    data = pack({"a": torch.randn(5)}, header)
    for end in range(0, len(data), 7):
        with pytest.raises(WeightsError):
            unpack(data[:end])


def test_another_format_is_refused(header):
    with pytest.raises(WeightsError, match="format 2"):
        read_header(pack({"a": torch.zeros(1)}, msgspec.structs.replace(header, format=2)))


def test_a_spec_that_was_edited_is_refused(header):
    with pytest.raises(WeightsError, match="changed after it was saved"):
        read_header(pack({"a": torch.zeros(1)}, msgspec.structs.replace(header, spec_hash="0" * 16)))


def test_nan_is_refused_by_name(header):
    with pytest.raises(WeightsError, match=r"not finite in 'bad\.weight'"):
        unpack(pack({"bad.weight": torch.tensor([1.0, float("nan")]), "good": torch.zeros(1)}, header))


def test_tensors_that_do_not_fit_are_named_and_nothing_is_copied():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    tensors = {n: t + 1 for n, t in before.items()}
    tensors["extra"] = tensors.pop("1.bias")
    tensors["0.weight"] = torch.zeros(3, 5)
    tensors["0.bias"] = tensors["0.bias"].double()
    with pytest.raises(WeightsError) as error:
        load_into(module, tensors)
    for part in (
        "missing '1.bias'",
        "not expected 'extra'",
        "'0.weight' is torch.float32[3, 5] instead of",
        "'0.bias'",
    ):
        assert part in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_what_a_header_claims_is_not_believed(header):
    text = msgspec.json.encode(header).decode()
    spec = msgspec.to_builtins(header.spec)
    many = spec | {"state": [spec["state"][0] | {"name": str(n)} for n in range(2000)]}
    endless = text.replace('"config":{', '"config":{"a":' + "[" * 10**5 + "]" * 10**5 + ",")
    for entries, message in (
        ({"__metadata__": {str(n): "" for n in range(10**6)}}, "above the cap"),
        ({"__metadata__": {"vla_fleet": text}, "a": tensor([2**38], 2**40)}, "the file has 4"),
        ({"__metadata__": {"vla_fleet": text}, "a": tensor([2**38], 4)}, "cannot be the bytes"),
        (
            {"__metadata__": {"vla_fleet": msgspec.json.encode({**json.loads(text), "spec": many}).decode()}},
            "at most 1024",
        ),
        ({"__metadata__": {"vla_fleet": endless}}, "cannot be read"),
    ):
        encoded = json.dumps(entries).encode()
        data = len(encoded).to_bytes(8, "little") + encoded + bytes(4 if "a" in entries else 0)
        with pytest.raises(WeightsError, match=message):
            unpack(data)


def tensor(shape, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
