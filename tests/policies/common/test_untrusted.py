"""A model's directory from elsewhere is read as data, and a network takes no more than its weights account for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from policies.common.allocation import AllocationCap
from policies.common.untrusted import refuse_code, require_model_directory, require_tensors
from wire.errors import ConfigError, FleetError, WeightsError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What there is in a directory of a language model."""
    directory = tmp_path / "vlm"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "smolvlm", "_attn_implementation": "sdpa"}')
    # words of a vocabulary are keys, too
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"class": 17, "auto_map": 3, "a": 1}}}')
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "trust_remote_code": false}')
    safetensors.torch.save_file({"a": torch.zeros(3)}, directory / "model.safetensors")
    return directory


def test_what_is_data_passes(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"class": "model.safetensors"}}')
    (model / "modeling_other.py").write_text("raise SystemExit")  # nothing names it
    require_model_directory(model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {"auto_map": {"AutoModel": "evil.Model"}}, r"'auto_map' names code"),
        ("tokenizer_config.json", {"auto_map": ["evil.Tokenizer", None]}, r"'auto_map' names code"),
        ("config.json", {"text_config": {"auto_map": {"AutoConfig": "somebody/evil--x.Y"}}}, r"text_config\.auto_map"),
        ("preprocessor_config.json", {"trust_remote_code": True}, "trust_remote_code"),
        ("config.json", {"custom_pipelines": {"x": {"impl": "evil.P"}}}, "custom_pipelines"),
        ("config.json", {"quantization_config": {"quant_method": "x"}}, "quantization_config"),
        ("config.json", {"layers": [{"_target_": "os.system"}]}, r"layers\[0\]\._target_"),
        ("config.json", {"_attn_implementation": "somebody/kernel"}, "somebody/kernel.*fetched and run"),
        ("config.json", {"text_config": {"attn_implementation": "a/b"}}, r"text_config\.attn_implementation"),
        ("adapter_config.json", {"base_model_name_or_path": "somebody/other"}, "adapters, which name another model"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"a": "../../x.safetensors"}},
            r"x\.safetensors.*same directory",
        ),
        (
            "model.safetensors.index.json",
            {"weight_map": {"a": "pytorch_model.bin"}},
            r"pytorch_model\.bin.*safetensors",
        ),
        ("model.safetensors.index.json", {"weight_map": []}, "no index"),
        ("model.safetensors.index.json", [], "no index"),
    ],
)
def test_what_would_run_or_fetch_something_is_named(model: Path, name: str, content: object, message: str) -> None:
    (model / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        require_model_directory(model)


def test_files_that_lead_elsewhere_or_do_not_end(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    for name, target in (("a.json", "../secret.json"), ("b.json", "/dev/zero"), ("c.safetensors", "/dev/zero")):
        (model / name).symlink_to(target)
        with pytest.raises(FleetError, match=rf"{name}: (it leads out|no regular file)"):
            require_model_directory(model)
        (model / name).unlink()
    (model / "d.json").write_text("[" * 10**6)
    with pytest.raises(ConfigError, match=r"d\.json: not JSON"):
        require_model_directory(model)


def test_weights_that_are_a_pickle(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    require_model_directory(model)  # nobody looks at it
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: a pickle"):
        require_model_directory(model)
    (model / "model.safetensors").write_bytes(b"\x80\x04N." + bytes(9))
    with pytest.raises(WeightsError, match=r"a pickle.*Or do something else"):
        require_tensors(model / "model.safetensors", model, "Or do something else.")


def test_nothing_is_said_of_what_is_switched_off() -> None:
    refuse_code({"auto_map": {}, "class": None, "trust_remote_code": False, "quantization_config": None}, Path("a"))


class TestAllocationCap:
    def test_a_network_of_its_weights_is_built(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        network = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.MultiheadAttention(8, 2))
        safetensors.torch.save_file(network.state_dict(), file)
        with AllocationCap(file, "config.json"):
            nn.Sequential(nn.Linear(64, 64), nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.MultiheadAttention(8, 2))

    def test_a_larger_one_is_refused_before_it_has_memory(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        safetensors.torch.save_file({"a": torch.zeros(3)}, file)
        with (
            AllocationCap(file, "config.json"),
            pytest.raises(ConfigError, match=r"config\.json: .*model\.safetensors"),
        ):
            nn.Linear(2**20, 2**24)  # 64 TiB

    def test_without_weights_the_machine_is_the_cap(self) -> None:
        with AllocationCap(None, "config.json"), pytest.raises(ConfigError, match="this machine has memory for"):
            nn.Embedding(2**24, 2**24)
