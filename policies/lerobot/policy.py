"""Any policy of lerobot as a fast/slow policy of the fleet: `Policy` for a robot, `TrainablePolicy` for a learner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from policies.common.batches import to_tensor
from policies.common.loading import load_whole
from policies.common.noise import draw_seed, seeded
from policies.common.runtime import acting, compiled
from policies.common.weights import Header, pack_module, refresh, unpack_own
from policies.interface.policy import (
    Batch,
    NormalizationData,
    check_observation,
    chunk,
    oldest_frame_ns,
    require_prefix,
    require_version,
)
from policies.interface.trainable import apply_finetuning
from policies.lerobot.batch_adapter import BatchAdapter, ObservationHistory
from policies.lerobot.checkpoint import LeRobotCheckpoint
from policies.lerobot.checkpoint_path import POSTPROCESSOR, PREPROCESSOR
from policies.lerobot.mapping import match, sizes
from policies.lerobot.options import LeRobotOptions
from policies.lerobot.partitions.partition import ACTION, Guide, Network, PolicyPartition
from policies.lerobot.partitions.vision import ActPartition, DiffusionPartition, WholePartition
from policies.lerobot.partitions.vla import PI0Partition, PI05Partition, SmolVLAPartition
from policies.lerobot.statistics import (
    ATTRIBUTE,
    Statistics,
    of_examples,
    of_limits,
    require_sound,
    state_alone,
)
from wire.errors import HalfLoadedError, PolicyError
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, ResidualPolicy, RobotSpec

if TYPE_CHECKING:
    from lerobot.processor import PolicyProcessorPipeline

NETWORK = "lerobot"
"""`Header.network` of this policy's files"""

PARTITIONS: dict[str, type[PolicyPartition]] = {
    "act": ActPartition,
    "diffusion": DiffusionPartition,
    "smolvla": SmolVLAPartition,
    "pi0": PI0Partition,
    "pi05": PI05Partition,
}
"""by `type` in a checkpoint's config.json; any other is not divided"""

_MAKER = "maker"
"""in the metadata of a latent: who alone can read its tensors"""
_DEFAULT = LeRobotOptions()
_LOCAL = (
    *("device", "use_amp", "use_peft", "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path"),
    *("compile_model", "compile_mode", "gradient_checkpointing", "vlm_model_name", "load_vlm_weights", "rtc_config"),
    *("do_mask_loss_for_padding", "dtype", "drop_n_last_frames"),
)
"""fields of a lerobot configuration that say nothing about what its weights mean"""


class LeRobotPolicy:
    """lerobot's network, its own processors and its own loss behind the fleet's interface.

    Not for several threads: whoever serves it calls `load` between two inferences.
    """

    ticks_ahead: tuple[int, ...] = ()
    corrector: ResidualPolicy | None = None

    def __init__(
        self,
        spec: RobotSpec,
        checkpoint: LeRobotCheckpoint,
        config: LeRobotOptions = _DEFAULT,
        seed: int = 0,
    ) -> None:
        """`seed` is for the noise of `act` and for adapters. `config.fresh` weights are the same for every seed, as
        what is frozen of them must be on every machine.

        Raises `ConfigError` for a checkpoint that does not fit `spec` or this
        machine, or that lacks statistics, and `WeightsError` for weights that cannot be used; both name the file.
        """
        self.spec = spec
        self.checkpoint = checkpoint
        self.config = config
        self.version = 0
        self.runtime = config.runtime
        self.runtime.require()
        self.device = torch.device(self.runtime.device)
        self._type = checkpoint.type
        self._maker = f"a '{checkpoint.type}' policy for robot spec {spec.hash}"
        self._partition = PARTITIONS.get(checkpoint.type, WholePartition)()
        self.think_reads_state = self._partition.think_reads_state
        self.pretrained = not config.fresh and config.statistics != "buffer"
        self.max_offset = config.max_offset
        self.trained = PolicyCapabilities(config.max_offset, config.max_offset > 0)
        what = str(checkpoint.path)
        self.cameras = pictures = match(spec, checkpoint.stored, config.cameras, what)
        described = _described(checkpoint) | {"cameras": pictures, "max_offset": config.max_offset}
        self._header = Header(NETWORK, described, spec, spec.hash)
        self.module: Network = checkpoint.policy(str(self.device), 0 if config.fresh else None)
        self.horizon = self._partition.horizon(self.module)
        self.history = past = int(getattr(checkpoint.config, "n_obs_steps", 1)) - 1
        self._adapter = BatchAdapter(
            spec, self.horizon, past, pictures, sizes(spec, checkpoint.stored, pictures, what), self.device
        )
        self._statistics = self._processors()
        unreached = self._partition.unreached(self.module)
        for name, parameter in self.module.named_parameters():
            if name in unreached:
                parameter.requires_grad_(False)
        apply_finetuning(self.module, config.training, self._partition.lora_targets, seed)
        self.module.eval()
        self._acting: Network = acting(self.module, self.runtime)
        self._act = self._partition.act if self._partition.draws else compiled(self._partition.act, self.runtime)
        self._seeds = torch.Generator().manual_seed(seed)
        self._latent_history = ObservationHistory(past + 1, spec.period_ns)
        self._state_history = ObservationHistory(past + 1, spec.period_ns)
        self._kept: tuple[np.ndarray, list[torch.Tensor]] | None = None

    @property
    def processors(self) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
        """lerobot's pre- and post-processor, with the statistics that this policy has now."""
        self._statistics.attach()
        return self._preprocess, self._postprocess

    # --- Policy ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def think(self, observation: Observation) -> Latent:
        """What the type's slow path makes of the newest frames and the instruction, uint8[n] (`_pack`).

        Nothing is remembered from one call to the next, so one policy can think for several robots. Its time is that of
        the oldest of the frames. Raises `InvalidDataError` if what it reads does not fit the spec. A camera it does not
        look at may be missing.
        """
        cameras = self._adapter.pictures.values()
        check_observation(self.spec, observation, cameras)
        with self._inference(0):
            seen = self._preprocess(self._adapter.observation_batch(observation))
            tensors = self._partition.think(self._acting, seen)
        data = _pack(tensors, self._maker)
        self._kept = (data, tensors)
        return Latent(data, oldest_frame_ns(observation, cameras), self.version)

    @torch.no_grad()
    def act(
        self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None, seed: int = 0
    ) -> ActionChunk:
        """float32[H, da] within the spec's limits; reads the state and the latent, never an image.

        A type with `history` sees the states and latents of earlier calls as well, by their times: one policy acts for
        one robot.

        The chunk begins with what `prefix` has committed. A guided prefix steers a type that has lerobot's real-time
        chunking; no lerobot policy is trained to read a prefix.

        The chunk names the seed of its noise, and is made again with that `seed` and the same history; 0 draws one.

        Raises `PolicyError` for a latent of another version or policy, a prefix that does not fit or cannot be used,
        and when the network gives NaN.
        """
        require_version(latent, self.version)
        check_observation(self.spec, observation, ())
        guided = self._require_usable(prefix)
        thought = self._tensors(latent)
        batch = self._adapter.state_batch(observation)
        if guided is not None:
            batch[ACTION] = to_tensor(guided.actions, self.device)[None].float()
        batch = self._preprocess_state(batch)
        guide = None if guided is None else Guide(batch[ACTION][0], guided.committed)
        batch = {name: value for name, value in batch.items() if name.startswith("observation.")}
        if self.history:
            self._latent_history.add(latent.observed_ns, observation.task, thought)
            thought = self._latent_history.nearest()
            states = {name: batch[name] for name in sorted(batch)}
            self._state_history.add(observation.time_ns, observation.task, list(states.values()))
            batch |= dict(zip(states, self._state_history.interpolated(), strict=True))
        shape = self._partition.noise_shape(self._acting)
        if shape is not None or self._partition.draws:
            seed = seed or draw_seed(self._seeds)
        noise = None if shape is None else torch.randn(shape, generator=seeded(seed)).to(self.device)
        with self._inference(seed):
            act = self._act if guide is None else self._partition.act
            actions = act(self._acting, thought, batch, noise, guide)
        if tuple(actions.shape) != (1, self.horizon, self.spec.action_dim):
            raise PolicyError(
                f"{self._maker} gave actions of shape {list(actions.shape)} instead of "
                f"{[1, self.horizon, self.spec.action_dim]}."
            )
        # as a batch of H: processors of lerobot expect [b, da]
        chosen = self._postprocess(actions[0].float()).cpu().numpy().astype(np.float32)
        return chunk(chosen, self.spec, self.version, observation, latent, tick, prefix, seed)

    def load(self, weights: bytes, version: int) -> None:
        """Take all that `weights` has of `version` at once, its normalisation statistics included.

        Raises `SpecMismatchError` for another robot's weights and `WeightsError` for anything else that does not fit,
        such as another lerobot type or configuration, or another frozen base; the old weights stay. `HalfLoadedError`
        when they do not: then no version is loaded.
        """
        what = f"weights of version {version}"
        header, tensors = unpack_own(weights, self._header, what)
        try:
            load_whole(self.module, self._acting, header, tensors, what)
        except HalfLoadedError:
            self.version = 0
            raise
        self._forget()
        self.version = version

    # --- TrainablePolicy ---------------------------------------------------------------------------------------

    def set_normalization(self, examples: NormalizationData) -> None:
        """Take the statistics of states and actions, unless they came from the checkpoint or the spec."""
        if self.config.statistics == "buffer":
            self._statistics.put(of_examples(self.spec, self._features(), examples))
            self._changed()

    def loss(self, batch: Batch) -> torch.Tensor:
        """The type's own imitation loss, as a mean over the actions that are kept: a scalar.

        See `BatchAdapter.training_batch` for the batch; noise, flow times and dropout come from torch's global
        generator. Raises `InvalidDataError` that names what does not fit.
        """
        prepared = self._preprocess(self._adapter.training_batch(batch))
        self.module.train()
        return self._partition.loss(self.module, self._partition.arrange(self.module, prepared))

    def save(self, module: nn.Module | None = None) -> bytes:
        """What training changes in `module` (default: this policy's own), and the statistics, as a safetensors file."""
        return pack_module(self.module if module is None else module, self._header)

    # --- inside ------------------------------------------------------------------------------------------------

    def _features(self) -> dict[str, Any]:
        config = self.checkpoint.config
        return dict(config.input_features or {}) | dict(config.output_features or {})

    def _processors(self) -> Statistics:
        """Make both processors and hang their statistics below the network."""
        given = None
        if self.config.statistics != "checkpoint":
            given = of_limits(self.spec, self._features())
        self._preprocess, self._postprocess = self.checkpoint.processors(str(self.device), given)
        for name, pipeline in ((PREPROCESSOR, self._preprocess), (POSTPROCESSOR, self._postprocess)):
            require_sound(pipeline, self._features(), str(self.checkpoint.statistics_file(name)))
        self._preprocess_state = state_alone(self._preprocess, torch.zeros(1, self.spec.state_dim, device=self.device))
        statistics = Statistics(self._preprocess, self._postprocess).to(self.device)
        statistics.attach()
        self.module.add_module(ATTRIBUTE, statistics)
        return statistics

    def _changed(self) -> None:
        """After new values were written into `module`."""
        refresh(self._acting, self.module)
        self._forget()

    def _forget(self) -> None:
        """What was made with the values that there were before."""
        self._statistics.attach()
        self._kept = None
        self._latent_history.clear()
        self._state_history.clear()

    @contextmanager
    def _inference(self, seed: int) -> Iterator[None]:
        """Eval mode and the runtime's number format; random numbers from `seed`, and the global stream as it was."""
        if self._acting.training:  # to say so to hundreds of modules takes a while
            self._acting.eval()
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), self.runtime.autocast():
            torch.random.default_generator.manual_seed(seed)
            for device in cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield

    def _tensors(self, latent: Latent) -> list[torch.Tensor]:
        """The latent's tensors on the device; those of this process's last thought are there already."""
        if self._kept is not None and latent.data is self._kept[0]:
            return self._kept[1]
        return [tensor.to(self.device) for tensor in _unpack(latent.data, self._maker)]

    def _require_usable(self, prefix: Prefix | None) -> Prefix | None:
        """The prefix if it is to guide. Raises `PolicyError` for one that this policy cannot use."""
        if prefix is None:
            return None
        require_prefix(self.horizon, self.spec, prefix)
        if prefix.guided:
            if not self._partition.guided:
                raise PolicyError(
                    f"a '{self._type}' policy cannot be guided towards a prefix; ask for chunks without one."
                )
            return prefix if len(prefix.actions) else None
        if prefix.committed:
            raise PolicyError(
                f"version {self.version} was not trained with committed prefixes, as no lerobot policy is; ask "
                f"{'with `guided` or ' if self._partition.guided else ''}without a prefix."
            )
        return None


def _described(checkpoint: LeRobotCheckpoint) -> dict[str, Any]:
    """The fields of lerobot's configuration that two machines must agree on, as JSON gives them back."""
    import draccus

    with draccus.config_type("json"):
        fields = json.loads(json.dumps(draccus.encode(checkpoint.config)))
    meant = {
        name: value
        for name, value in fields.items()
        if name not in _LOCAL and not name.startswith(("optimizer_", "scheduler_"))
    }
    return {"type": checkpoint.type} | meant


def _pack(tensors: list[torch.Tensor], maker: str) -> np.ndarray:
    """uint8[n]: a safetensors file with the tensors by their number."""
    named = {str(number): tensor.detach().cpu().contiguous() for number, tensor in enumerate(tensors)}
    return np.frombuffer(safetensors.torch.save(named, {_MAKER: maker}), np.uint8)


def _unpack(data: np.ndarray, maker: str) -> list[torch.Tensor]:
    """What `_pack` was given, on the CPU. Raises `PolicyError` for anything else, and for the latent of another."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise PolicyError(
            f"a latent of {data.dtype}{list(data.shape)}; {maker} makes uint8[n]. Call its think() again."
        )
    file = data.tobytes()
    try:
        found = msgspec.json.decode(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"][_MAKER]
        tensors = safetensors.torch.load(file) if found == maker else {}
    except (SafetensorError, msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"a latent that {maker} did not make, or torn: {error}. Call its think() again.") from error
    if found != maker:
        raise PolicyError(f"a latent of {found}; this is {maker}. Call its think() again.")
    return [tensors[str(number)] for number in range(len(tensors))]
