"""A checkpoint from elsewhere: each way by which lerobot would run what it names, fetch it or read another file.

The marker stands for whatever somebody would run: `os.mkdir`, called as lerobot calls a processor step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from policies.lerobot.checkpoint import LeRobotCheckpoint
from policies.lerobot.checkpoint_checks import require_known_adapters
from policies.lerobot.checkpoint_path import VLM, adapted, locate, resolve
from policies.lerobot.factory import make
from tests.extras import needs
from wire.errors import ConfigError, FleetError, WeightsError

pytestmark = needs("lerobot")

BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"


@pytest.fixture
def checkpoint(act_dir: Path, tmp_path: Path) -> Path:
    """A copy of a good one."""
    return Path(shutil.copytree(act_dir, tmp_path / "checkpoint"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "was run"


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


def test_a_good_one_is_read(checkpoint, robot) -> None:
    assert make(str(checkpoint), {}, robot, 0).horizon == 8


def test_a_step_that_lerobot_would_call(checkpoint, robot, marker) -> None:
    step = {"class": "os.mkdir", "config": {"path": str(marker)}}
    for name in (BEFORE, AFTER):
        shutil.copytree(checkpoint, copy := checkpoint.with_name(name))
        change(copy / name, lambda content: content["steps"].insert(0, step))
        with pytest.raises(ConfigError) as refused:
            make(str(copy), {}, robot, 0)
        assert not marker.exists(), "what the file names was called"
        assert f"{name}: steps[0] is 'os.mkdir'" in str(refused.value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"class": "subprocess.Popen", "config": {"args": ["true"]}}, r"'subprocess\.Popen'"),
        ({"class": "no_such_module_of_theirs.Step"}, "no_such_module"),
        ({"class": "lerobot.processor.pipeline.importlib"}, "no processor step"),
        ({"class": "lerobot.processor.pipeline.hf_hub_download"}, "no processor step"),
        ({"class": "lerobot.processor.ActionTokenizerProcessorStep"}, "no processor step"),
        ({"class": "lerobot.utils.utils.os.mkdir"}, "no processor step"),
        ({"class": None}, "'None'"),
        ({}, "'None'"),
        ({"registry_name": "action_tokenizer_processor"}, "'action_tokenizer_processor'"),
        ({"registry_name": "reward_classifier_processor"}, "'reward_classifier_processor'"),
        ({"registry_name": "groot_eagle_encode_v3"}, "'groot_eagle_encode_v3'"),
        ({"registry_name": "normaliser_processor"}, "mean 'normalizer_processor'"),
        ({"registry_name": "", "class": "lerobot.processor.DeviceProcessorStep"}, "is ''"),
        ({"registry_name": "device_processor", "run": "x"}, "'run'"),
        ({"registry_name": "device_processor", "config": {"a": {"_target_": "os.mkdir"}}}, "_target_"),
        ({"registry_name": "tokenizer_processor", "config": {"trust_remote_code": True}}, "trust_remote_code"),
    ],
)
def test_steps_that_are_not_known_to_only_compute(checkpoint, step, message) -> None:
    change(checkpoint / BEFORE, lambda content: content["steps"].append({"config": {}} | step))
    with pytest.raises(ConfigError, match=f"{BEFORE}: .*{message}"):
        LeRobotCheckpoint.open(str(checkpoint)).processors()


def test_a_known_step_may_be_named_by_its_class(checkpoint) -> None:
    def by_class(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            if step.get("registry_name") == "device_processor":
                del step["registry_name"]
                step["class"] = "lerobot.processor.device_processor.DeviceProcessorStep"

    change(checkpoint / BEFORE, by_class)
    before, _ = LeRobotCheckpoint.open(str(checkpoint)).processors()
    assert "DeviceProcessorStep" in {type(step).__name__ for step in before.steps}


def test_a_step_of_an_installed_package(checkpoint) -> None:
    from lerobot.processor import ObservationProcessorStep, ProcessorStepRegistry

    @ProcessorStepRegistry.register("of_a_plugin")
    class Plugin(ObservationProcessorStep):
        def observation(self, observation):
            return observation

        def transform_features(self, features):
            return features

    try:
        change(checkpoint / BEFORE, lambda content: content["steps"].append({"registry_name": "of_a_plugin"}))
        before, _ = LeRobotCheckpoint.open(str(checkpoint)).processors()
        assert isinstance(before.steps[-1], Plugin)
    finally:
        ProcessorStepRegistry.unregister("of_a_plugin")


@pytest.mark.parametrize("kind", ["groot", "pi0_fast", "sac", "reward_classifier", "wall_x"])
def test_types_for_which_lerobot_runs_python_of_others(checkpoint, kind) -> None:
    from lerobot.configs.policies import PreTrainedConfig

    LeRobotCheckpoint.open(str(checkpoint))  # registers them
    assert kind in PreTrainedConfig.get_known_choices()
    change(checkpoint / "config.json", lambda content: content.update(type=kind))
    with pytest.raises(ConfigError, match=rf"config\.json: .*'{kind}'.*Known: act"):
        LeRobotCheckpoint.open(str(checkpoint))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rtc_config": {"_target_": "os.mkdir"}}, r"rtc_config\._target_"),
        ({"class": "os.mkdir"}, "'class' names code"),
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
        ({"dim_model": 2**40}, "'dim_model' is above"),
        ({"input_features": {"observation.state": {"type": "STATE", "shape": [2**62]}}}, r"shape\[0\]' is above"),
        ({"vision_backbone": "os.mkdir"}, "not a configuration of a 'act' policy"),
    ],
)
def test_configurations_that_are_more_than_numbers(checkpoint, fields, message) -> None:
    change(checkpoint / "config.json", lambda content: content.update(fields))
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        LeRobotCheckpoint.open(str(checkpoint))


def test_sizes_that_the_weights_do_not_account_for(checkpoint) -> None:
    fields = {"dim_model": 2**16, "dim_feedforward": 2**20}
    change(checkpoint / "config.json", lambda content: content.update(fields))
    with pytest.raises(ConfigError, match=r"config\.json: its sizes make a network of more than .*model\.safetensors"):
        LeRobotCheckpoint.open(str(checkpoint)).policy()


def test_it_is_not_told_where_it_came_from(checkpoint) -> None:
    change(checkpoint / "config.json", lambda content: content.update(pretrained_path="somebody/policy"))
    assert LeRobotCheckpoint.open(str(checkpoint)).config.pretrained_path is None


@pytest.mark.parametrize("name", ["config.json", BEFORE, "model.safetensors", "state"])
@pytest.mark.parametrize("target", ["outside", "/dev/zero"])
def test_files_that_are_links_to_somewhere_else(checkpoint, robot, tmp_path, name, target) -> None:
    path = next(checkpoint.glob("*normalizer*.safetensors")) if name == "state" else checkpoint / name
    if target == "outside":
        path.rename(tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
    else:
        path.unlink()
        path.symlink_to(target)
    # a device counts as a file that is missing
    said = f"{path.name}: it leads out" if target == "outside" else path.name
    with pytest.raises(FleetError, match=said):
        make(str(checkpoint), {}, robot, 0)


@pytest.mark.parametrize("place", ["../state.safetensors", "/etc/hostname", "a/b.safetensors", "state.bin", ["x"], 7])
def test_state_that_lies_somewhere_else(checkpoint, tmp_path, place) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "state.safetensors")
    change(checkpoint / BEFORE, lambda content: [step.update(state_file=place) for step in content["steps"]])
    with pytest.raises(ConfigError, match=f"{BEFORE}: state_file .* is no safetensors file beside it"):
        LeRobotCheckpoint.open(str(checkpoint)).processors()


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}},
        {"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 4]}},
        {"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_weights_whose_header_lies(checkpoint, robot, header) -> None:
    text = json.dumps(header).encode()
    (checkpoint / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(WeightsError, match=r"model\.safetensors: .*Copy it again"):
        make(str(checkpoint), {}, robot, 0)


def test_a_name_in_a_file_fetches_nothing(tmp_path, monkeypatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(repository: str, **options: Any) -> str:
        assert options["local_files_only"], "a file must not have anything fetched"
        if repository != "somebody/cached":
            raise LocalEntryNotFoundError("not here")
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    file = tmp_path / BEFORE
    with pytest.raises(ConfigError, match=f"{BEFORE}: tokenizer_name is 'somebody/model'.*hf download somebody/model"):
        resolve(tmp_path, "somebody/model", "tokenizer_name", file)
    with pytest.raises(ConfigError, match="in the cache"):
        locate("somebody/model", fetch=False)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/model"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: base_model_name_or_path is 'somebody/model'"):
        adapted(tmp_path)
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / "config.json").write_text("{}")
    assert resolve(tmp_path, "somebody/cached", "tokenizer_name", file) == str(tmp_path / "cached")
    (tmp_path / "cached" / "config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.T"}}')
    with pytest.raises(ConfigError, match=r"config\.json: 'auto_map' names code"):
        resolve(tmp_path, "somebody/cached", "tokenizer_name", file)


def test_a_tokenizer_of_its_own_that_names_code(tmp_path) -> None:
    (tmp_path / VLM).mkdir()
    (tmp_path / VLM / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}}')
    (tmp_path / VLM / "evil.py").write_text("raise SystemExit")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: 'auto_map' names code"):
        resolve(tmp_path, "x/y", "tokenizer_name", tmp_path / BEFORE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "trust_remote_code"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "MULTITASK_PROMPT_TUNING.*merge_and_unload"),
        ({"peft_type": None}, "None"),
        ({"megatron_config": {"a": 1}, "megatron_core": "lerobot.evil"}, "'megatron_config' would import"),
        ({"corda_config": {"cache_file": "x.pt"}}, "'corda_config'"),
        ({"r": 2**40}, "'r' is above"),
    ],
)
def test_adapters_by_which_peft_would_run_something(tmp_path, fields, message) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    require_known_adapters(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | fields))
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: .*{message}"):
        require_known_adapters(tmp_path)
