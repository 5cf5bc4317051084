"""Where checkpoints lie and what is wrong with them: files alone, without torch and without lerobot."""

from __future__ import annotations

import json
import sys

import pytest

from policies.interface.registry import read_options
from policies.lerobot.checkpoint_path import VLM, locate, read_config, resolve, weights_file
from policies.lerobot.factory import defaults, make
from policies.lerobot.mapping import match, sizes
from policies.lerobot.options import LeRobotOptions
from wire.errors import ConfigError, WeightsError
from wire.types import CameraSpec, Dimension, RobotSpec

ACT = {
    "type": "act",
    "chunk_size": 8,
    "n_action_steps": 4,
    "optimizer_lr": 2e-5,
    "optimizer_weight_decay": 1e-4,
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [2]},
        "observation.images.front": {"type": "VISUAL", "shape": [3, 32, 48]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
}


@pytest.fixture
def two() -> RobotSpec:
    limits = (Dimension("x", "m", -1.0, 1.0), Dimension("y", "m", -1.0, 1.0))
    return RobotSpec("two", limits, limits, (CameraSpec("front", 32, 48, 20.0),), 20.0)


def with_cameras(spec: RobotSpec, *names: str) -> RobotSpec:
    return RobotSpec(spec.embodiment, spec.state, spec.action, tuple(CameraSpec(n, 32, 48, 20.0) for n in names), 20.0)


def features(*names: str) -> dict:
    pictures = {f"observation.images.{n}": {"type": "VISUAL", "shape": [3, 32, 48]} for n in names}
    return ACT | {"input_features": {"observation.state": {"type": "STATE", "shape": [2]}, **pictures}}


def write(directory, config=ACT):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class TestLocate:
    def test_a_run_of_lerobot_train_means_its_last_checkpoint(self, tmp_path):
        run = tmp_path / "run"
        for step in ("000100", "000900"):
            write(run / "checkpoints" / step / "pretrained_model")
        newest = run / "checkpoints" / "000900" / "pretrained_model"
        assert locate(str(run)) == newest
        (run / "checkpoints" / "last").symlink_to("000100")
        chosen = run / "checkpoints" / "000100" / "pretrained_model"
        places = (run, run / "checkpoints", run / "checkpoints" / "last", chosen)
        assert all(locate(str(place)).resolve() == chosen for place in places)

    def test_a_directory_that_is_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"there is no directory .*nothing_here.*lerobot-train"):
            locate(str(tmp_path / "nothing_here"))

    def test_a_directory_with_other_files(self, tmp_path):
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(ConfigError, match=r"config\.json is missing.*has notes\.txt.*pretrained_model"):
            locate(str(tmp_path))

    def test_a_file(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"")
        with pytest.raises(ConfigError, match="is a file"):
            locate(str(path))

    def test_no_place(self):
        with pytest.raises(ConfigError, match="no checkpoint"):
            locate("")

    def test_a_hub_name_without_a_network(self, monkeypatch):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match=r"'somebody/some_policy'.*not in the cache.*hf download somebody/some"):
            locate("somebody/some_policy")

    @pytest.mark.parametrize(
        ("name", "status", "message"),
        [
            ("RepositoryNotFoundError", 404, "not found.*HF_TOKEN"),
            ("GatedRepoError", 403, "gated.*hf auth login"),
            ("RevisionNotFoundError", 404, "no revision 'v9'"),
            ("HfHubHTTPError", 500, "cannot be reached"),
        ],
    )
    def test_what_the_hub_answers(self, monkeypatch, name, status, message):
        import huggingface_hub
        from huggingface_hub import errors
        from requests import Response

        def refuse(repository, **named):
            assert repository == "somebody/some_policy"
            response = Response()
            response.status_code = status
            raise getattr(errors, name)("no", response=response)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ConfigError, match=message):
            locate("somebody/some_policy@v9")

    def test_a_name_that_cannot_be_one(self):
        with pytest.raises(ConfigError, match="no valid name"):
            locate("some body")


class TestFiles:
    def test_a_config_that_is_not_json(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
            read_config(tmp_path)

    @pytest.mark.parametrize("text", ["[]", '{"model_type": "llama"}'])
    def test_a_config_of_something_else(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_config(tmp_path)

    def test_weights_that_are_missing(self, tmp_path):
        with pytest.raises(WeightsError, match=r"no model\.safetensors beside config\.json.*fresh"):
            weights_file(tmp_path)

    def test_weights_in_parts(self, tmp_path):
        (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
        with pytest.raises(WeightsError, match="in parts"):
            weights_file(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "policy.ckpt", "model.pt"])
    def test_a_pickle_instead(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(WeightsError, match=f"only {name}: a pickle.*save_pretrained"):
            weights_file(tmp_path)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"PK\x03\x04" + bytes(40), "pickle"),
            (b"\x80\x04N." + bytes(9), "pickle"),
            (b"\xff" * 12, "torn"),
            (b"", "torn"),
        ],
    )
    def test_what_is_no_safetensors(self, tmp_path, data, message):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(WeightsError, match=message):
            weights_file(tmp_path)

    @pytest.mark.parametrize("length", [0x80, 19_280])
    def test_a_header_whose_length_looks_like_a_pickle(self, tmp_path, length):
        path = tmp_path / "model.safetensors"
        path.write_bytes(length.to_bytes(8, "little") + b"{}".ljust(length))
        assert weights_file(tmp_path) == path

    def test_a_tokenizer_beside_the_checkpoint_comes_first(self, tmp_path):
        (tmp_path / "tokens").mkdir()
        file = tmp_path / "policy_preprocessor.json"
        assert resolve(tmp_path, "/elsewhere/tokens", "tokenizer_name", file) == str(tmp_path / "tokens")
        (tmp_path / VLM).mkdir()
        assert resolve(tmp_path, "somebody/model", "vlm_model_name", file) == str(tmp_path / VLM)

    def test_a_torn_tokenizer(self, tmp_path):
        (tmp_path / VLM).mkdir()
        (tmp_path / VLM / "tokenizer.json").write_bytes(b"\x00garbage")
        with pytest.raises(ConfigError, match=r"vlm/tokenizer\.json: not JSON.*Copy"):
            resolve(tmp_path, "somebody/model", "vlm_model_name", tmp_path / "config.json")

    def test_a_tokenizer_on_another_machine(self, tmp_path):
        file = tmp_path / "policy_preprocessor.json"
        with pytest.raises(ConfigError, match=r"policy_preprocessor\.json: tokenizer_name is '/home/her/vlm'.*Copy"):
            resolve(tmp_path, "/home/her/vlm", "tokenizer_name", file)
        with pytest.raises(ConfigError, match=r"tokenizer_name is .somebody/model.*nothing is fetched.*hf download"):
            resolve(tmp_path, "somebody/model", "tokenizer_name", file)


class TestMapping:
    def test_cameras_by_name(self, two):
        assert match(two, ACT, {}, "policy") == {"observation.images.front": "front"}

    def test_the_only_camera_is_the_only_picture(self, two, caplog):
        with caplog.at_level("INFO"):
            assert match(two, features("top"), {}, "policy") == {"observation.images.top": "front"}
        assert "'front' is its only picture 'observation.images.top'" in caplog.text

    def test_cameras_by_option(self, two):
        spec = with_cameras(two, "left", "right")
        said = {"a": "right", "observation.images.b": "left"}
        found = match(spec, features("a", "b"), said, "policy")
        assert found == {"observation.images.a": "right", "observation.images.b": "left"}

    def test_missing_cameras_list_both_sides(self, two):
        with pytest.raises(
            ConfigError, match=r"no camera for \['observation.images.wrist'\].*has \['front'\].*cameras {"
        ):
            match(two, features("front", "wrist"), {}, "policy")

    def test_options_that_name_nothing(self, two):
        with pytest.raises(ConfigError, match=r"names 'observation.images.back'.*does not look at"):
            match(two, ACT, {"back": "front"}, "policy")
        with pytest.raises(ConfigError, match="the camera 'back', which is not there"):
            match(two, ACT, {"front": "back"}, "policy")

    def test_empty_cameras_may_be_missing(self, two):
        config = features("front", "wrist") | {"empty_cameras": 1}
        config["input_features"]["observation.images.empty_camera_0"] = {"type": "VISUAL", "shape": [3, 480, 640]}
        assert match(two, config, {}, "policy") == {"observation.images.front": "front"}
        with pytest.raises(ConfigError, match="no camera for"):
            match(with_cameras(two, "back", "side"), config, {}, "policy")

    def test_a_camera_it_does_not_look_at(self, two, caplog):
        with caplog.at_level("INFO"):
            assert list(match(with_cameras(two, "front", "wrist"), ACT, {}, "policy").values()) == ["front"]
        assert "does not look at camera ['wrist']" in caplog.text

    @pytest.mark.parametrize(
        ("field", "name", "feature", "message"),
        [
            (
                "input_features",
                "observation.state",
                {"type": "STATE", "shape": [7]},
                r"state of \[7\].*has 2: \['x', 'y'\]",
            ),
            ("output_features", "action", {"type": "ACTION", "shape": [7]}, r"action of \[7\].*robot 'two' has 2"),
            ("input_features", "observation.environment_state", {"type": "ENV", "shape": [3]}, "environment_state"),
            ("input_features", "observation.effort", {"type": "STATE", "shape": [2]}, "observation.effort"),
        ],
    )
    def test_dimensions_and_features_that_do_not_fit(self, two, field, name, feature, message):
        with pytest.raises(ConfigError, match=message):
            match(two, ACT | {field: ACT[field] | {name: feature}}, {}, "policy")

    def test_a_policy_without_an_action(self, two):
        with pytest.raises(ConfigError, match="output_features have no 'action'"):
            match(two, ACT | {"output_features": {}}, {}, "policy")
        with pytest.raises(ConfigError, match="no input_features"):
            match(two, {"type": "act"}, {}, "policy")

    @pytest.mark.parametrize("shape", [[3], [3, "a", None], [1, 32, 48], [3, 0, 48], "3x32x48"])
    def test_a_picture_whose_shape_is_none(self, two, shape):
        config = features("front")
        config["input_features"]["observation.images.front"]["shape"] = shape
        with pytest.raises(ConfigError, match=r"config\.json.*'observation\.images\.front' .*shape.*again"):
            match(two, config, {}, "policy")

    @pytest.mark.parametrize("count", ["x", -1, 1.5])
    def test_empty_cameras_that_are_no_number(self, two, count):
        with pytest.raises(ConfigError, match=r"config\.json has empty_cameras.*write how many"):
            match(two, ACT | {"empty_cameras": count}, {}, "policy")

    def test_other_sizes_are_resized(self, two, caplog):
        small = RobotSpec("two", two.state, two.action, (CameraSpec("front", 64, 48, 20.0),), 20.0)
        with caplog.at_level("INFO"):
            found = sizes(small, ACT, match(small, ACT, {}, "policy"), "policy")
        assert found == {"observation.images.front": (32, 48)}
        assert "resized from 64x48 to 32x48" in caplog.text
        assert (
            sizes(small, ACT | {"resize_imgs_with_padding": [512, 512]}, {"observation.images.front": "front"}, "")
            == {}
        )


class TestHints:
    def test_they_come_from_the_checkpoint(self, tmp_path, two):
        write(tmp_path)
        (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        for processor in ("policy_preprocessor.json", "policy_postprocessor.json"):
            (tmp_path / processor).write_text("{}")
        found = defaults(str(tmp_path), {}, two)
        assert (found.horizon, found.learning_rate, found.weight_decay) == (8, 2e-5, 1e-4)
        assert (found.ticks_per_frame, found.pretrain_steps, found.demonstrations) == (1, 0, 0)
        assert found.batch is not None and found.batch <= 32
        assert defaults(str(tmp_path), {"override": {"chunk_size": 6}}, two).horizon == 6

    def test_diffusion_gives_all_that_it_makes(self, tmp_path, two):
        write(tmp_path, ACT | {"type": "diffusion", "horizon": 16, "n_obs_steps": 2, "n_action_steps": 8})
        assert defaults(str(tmp_path), {"fresh": True, "statistics": "spec"}, two).horizon == 15
        chosen = {"fresh": True, "statistics": "spec", "override": {"n_action_steps": 8}}
        assert defaults(str(tmp_path), chosen, two).horizon == 8

    def test_what_files_show_is_said_at_once(self, tmp_path, two):
        write(tmp_path)
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            defaults(str(tmp_path), {}, two)
        with pytest.raises(ConfigError, match=r"no policy_preprocessor\.json.*migrate_policy_normalization"):
            defaults(str(tmp_path), {"fresh": True}, two)
        with pytest.raises(ConfigError, match="no camera for"):
            defaults(str(tmp_path), {"fresh": True}, with_cameras(two, "a", "b"))

    def test_without_lerobot(self, tmp_path, two, monkeypatch):
        monkeypatch.setitem(sys.modules, "lerobot", None)
        with pytest.raises(ConfigError, match=r"lerobot is not installed.*pip install 'vla-fleet\[lerobot\]'"):
            make(str(write(tmp_path)), {}, two, 0)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"camera": {}}, "unknown field `camera`.*mean 'cameras'"),
            ({"statistics": "dataset"}, "statistics"),
            ({"max_offset": -1}, "max_offset"),
            ({"override": {"input_features": {}}}, "cannot change 'input_features'"),
            ({"training": {"lora": {"rank": 0}}}, "rank"),
        ],
    )
    def test_options_that_are_none(self, config, message):
        with pytest.raises(ConfigError, match=message):
            read_options(config, LeRobotOptions, "lerobot policy")
