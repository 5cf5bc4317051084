"""What the command line may change in a recipe for one run: policy, driver, pace, latency, and any single setting."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict

from cloud_learner.algorithms.registry import get_algorithm
from cloud_learner.buffer.maintenance.retention import Retention
from cloud_learner.buffer.sampling.target import StalenessBound
from fleet.config.recipe import NamedPolicy, Recipe
from fleet.config.robot_config import RobotConfigText, read_json, read_robot_config
from fleet.config.settings import with_settings
from fleet.config.weights_source import SourceKind, parse_source
from fleet.evaluation.injected_delay import parse_delay
from hal.registry import make_robot, read_config
from policies.interface.policy import LearnedPolicy
from policies.interface.registry import PolicyChoice, defaults, make_policy, parse_policy
from robot_edge.chunking.config import check_strategy
from robot_edge.control.config import EpisodeRules
from wire.errors import ConfigError
from wire.types import RobotSpec

_WHO = ("person", "robot")


def unset(help: str, *names: str, **kept: Any) -> Any:
    """An option that is '' or 0 unless it is given: its `help` says what happens then."""
    return typer.Option(*names, help=help, show_default=False, **kept)


Strategy = Annotated[
    str,
    unset(
        "How late actions are dealt with: auto (as the checkpoint was trained), sync, naive, aligned, ensemble, "
        "future_state, rtc_guided, rtc_trained or residual; default: the recipe's."
    ),
]
Delay = Annotated[
    str, unset("Inject latency in control ticks: 4, random:2-8, or burst:2,12,0.05 (usual, long, share).")
]
SpeedUp = Annotated[int, unset("Execute every q-th action; 0: as the recipe says.")]
RobotKind = Annotated[str, unset("Another driver for the recipe's robot, such as ros2.")]
RobotConfig = Annotated[
    str, unset("That driver's configuration, and `safety`, its limits: JSON, or a file of JSON or TOML.")
]
PolicyName = Annotated[
    str,
    unset(
        "Another policy, KIND:NAME: flow:PRESET, lerobot:DIRECTORY or a hub name, tokens:PRESET; default: the recipe's."
    ),
]
AlgorithmName = Annotated[
    str,
    unset("Another algorithm: one of docs/algorithms.md, or module:Config for your own; default: the recipe's."),
]
PolicyConfig = Annotated[str, unset("That policy's configuration: JSON, or a file of JSON or TOML.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        show_default=False,
        help="Set a field of the recipe, such as training.learning_rate=1e-4; may be repeated. `vla-fleet recipes "
        "NAME` lists all.",
    ),
]
Start = Annotated[
    str,
    unset(
        "Begin with these weights: a weights file, DATA[:VERSION], what `vla-fleet train` made, or the directory of a "
        "lerobot checkpoint; default: the policy's first ones.",
        "--from",
    ),
]

ResetBy = Annotated[
    str,
    unset("Who resets the scene: person or robot; default: a person for a real one."),
]
JudgedBy = Annotated[
    str,
    unset("Who says how episodes ended: person or robot; default: a person for a real one, or where a person resets."),
]
ResetTime = Annotated[
    float, unset("Seconds for the scene, then the next episode begins; 0: as the recipe says, usually when told to.")
]
EpisodeTime = Annotated[float, unset("Seconds an episode may last, whoever drives; 0: as the recipe says.")]


@dataclass(frozen=True, slots=True)
class Overrides:
    """'', 0 and nothing leave what the recipe says. Raises `ConfigError` for what cannot be understood."""

    strategy: Strategy = ""
    delay: Delay = ""
    speed_up: SpeedUp = 0
    robot: RobotKind = ""
    robot_config: RobotConfig = ""
    policy: PolicyName = ""
    policy_config: PolicyConfig = ""
    algorithm: AlgorithmName = ""
    set_: Settings = field(default_factory=list)
    from_: Start = ""
    reset_by: ResetBy = ""
    judged_by: JudgedBy = ""
    reset_time_s: ResetTime = 0.0
    episode_time_s: EpisodeTime = 0.0

    def __post_init__(self) -> None:
        if self.strategy:
            check_strategy(self.strategy)
        if self.delay:
            parse_delay(self.delay)
        if self.speed_up < 0:
            raise ConfigError(f"speed-up {self.speed_up}: execute every q-th action with q of 1 or more.")
        for option, who in (("--reset-by", self.reset_by), ("--judged-by", self.judged_by)):
            if who not in ("", *_WHO):
                raise ConfigError(f"{option} {who}: there are {' and '.join(_WHO)}.")
        self.rules(EpisodeRules())
        if self.from_:
            self._settle_start()
        if self.policy_config and not self.policy:
            raise ConfigError("--policy-config needs --policy KIND:NAME, which it configures.")

    def _settle_start(self) -> None:
        """A lerobot checkpoint is a policy of its own; what else training begins with means the same everywhere."""
        start = parse_source(self.from_, "--from")
        policy, start_text = self.policy, str(start)
        if start.kind == SourceKind.untrained:
            raise ConfigError("--from untrained: that is how training begins anyway; leave it out.")
        if start.kind == SourceKind.checkpoint:
            if policy:
                raise ConfigError(f"--from {self.from_} is a policy of its own: leave --policy {policy} out.")
            policy, start_text = f"lerobot:{start.path}", ""
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "from_", start_text)

    def given(self, only: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Those of `only` that say something, by name; the policy's mean the same in every working directory."""
        choice = self.choice()
        same = self
        if choice is not None:
            config = json.dumps(choice.config) if choice.config else ""
            same = replace(self, policy=str(choice), policy_config=config)
        if "algorithm" not in only:
            # Who is not told of the algorithm has the recipe's, whose fields may be others.
            same = replace(same, set_=[one for one in same.set_ if not one.startswith("algorithm.")])
        for one in fields(same):
            if one.name in only and (value := getattr(same, one.name)):
                yield one.name, value

    def choice(self) -> PolicyChoice | None:
        """The policy that was asked for, its place absolute. Raises `ConfigError`."""
        if not self.policy:
            return None
        config = json.dumps(read_json(self.policy_config, "--policy-config")) if self.policy_config else ""
        return parse_policy(self.policy, config)

    @property
    def uses_gpu(self) -> bool:
        """Whether the policy was asked for on a graphics card."""
        choice = self.choice()
        runtime = choice.config.get("runtime") if choice is not None else None
        return isinstance(runtime, dict) and str(runtime.get("device", "")).startswith("cuda")

    def on_cpu(self) -> Overrides:
        """The same policy without a graphics card: what acts has that for itself."""
        choice = self.choice()
        runtime = choice.config.get("runtime") if choice is not None else None
        if choice is None or not isinstance(runtime, dict):
            return self
        config = {**choice.config, "runtime": {**runtime, "device": "cpu", "compile": False}}
        return replace(self, policy_config=json.dumps(config))

    def rules(self, usual: EpisodeRules) -> EpisodeRules:
        """`usual` with what is given here. Raises `ConfigError` for a time that cannot be."""
        return replace(
            usual,
            reset_by_person=self.reset_by == "person" if self.reset_by else usual.reset_by_person,
            judged_by_person=self.judged_by == "person" if self.judged_by else usual.judged_by_person,
            reset_s=self.reset_time_s or usual.reset_s,
            max_s=self.episode_time_s or usual.max_s,
        )

    def with_needs_of(self, recipe: Recipe) -> Overrides:
        """With what the algorithm asks of a recipe, where nothing else is given: its settings, and the recipe's own
        policy by name, if that is to be configured otherwise.

        So every process is told, and the data directory knows whose its versions are. Raises `ConfigError`.
        """
        own, algorithm = recipe.make_policy, self._learned(recipe).algorithm
        given = {text.partition("=")[0].strip() for text in self.set_}
        added = [text for text in algorithm.settings if text.partition("=")[0] not in given]
        told = replace(self, set_=[*added, *self.set_]) if added else self
        if self.policy or not isinstance(own, NamedPolicy):
            return told
        kind, config = algorithm.policy_kind or own.choice.kind, {**own.choice.config, **algorithm.policy_options}
        wanted = PolicyChoice(kind, own.choice.name_or_path, config)
        return told if wanted == own.choice else replace(told, policy=str(wanted), policy_config=json.dumps(config))

    def applied(self, recipe: Recipe) -> Recipe:
        """`recipe` with what is given here; each of its members, too.

        Raises `SpecMismatchError` for a driver of another robot, `ConfigError` for a policy that cannot be used with
        it.
        """
        if recipe.members:
            # a robot that the weights of --from do not know is demonstrated with
            each = replace(self, from_="")
            recipe = replace(recipe, members={name: each.applied(one) for name, one in recipe.members.items()})
        if self.robot or self.robot_config:
            recipe = self._driven(recipe)
        chunking = recipe.chunking
        chunking = replace(
            chunking, strategy=self.strategy or chunking.strategy, speed_up=self.speed_up or chunking.speed_up
        )
        loop = replace(recipe.loop, episodes=self.rules(recipe.loop.episodes))
        recipe = replace(recipe, chunking=chunking, delay=self.delay or recipe.delay, loop=loop)
        if self.from_:
            # It acts already: nothing is demonstrated to it first.
            recipe = replace(recipe, start=parse_source(self.from_, "--from"), demonstrations=0)
        told, recipe = self.with_needs_of(recipe), self._learned(recipe)
        if (choice := told.choice()) is not None:
            return with_policy(recipe, choice, told.set_)
        if recipe.tiny:
            recipe.make_policy(recipe.spec, 0)
        return with_settings(recipe, told.set_)

    def set_in(self, recipe: Recipe) -> Recipe:
        """`recipe` with its settings alone, its members as they are, for a process that runs no policy. Raises
        `ConfigError`."""
        return with_settings(self._learned(recipe), self.set_)

    def _learned(self, recipe: Recipe) -> Recipe:
        if self.algorithm and not isinstance(recipe.algorithm, type(algorithm := get_algorithm(self.algorithm))):
            return replace(recipe, algorithm=algorithm)
        return recipe

    def _driven(self, recipe: Recipe) -> Recipe:
        kind = self.robot or recipe.robot
        given = read_robot_config(self.robot_config) if self.robot_config else RobotConfigText()
        recipe = replace(recipe, loop=replace(recipe.loop, safety=given.limits(recipe.loop.safety)))
        config = read_config(kind, given.driver) if given.driver else None
        if config is None and kind == recipe.robot:
            config = recipe.robot_config
        recipe.spec.require(make_robot(kind, config).spec, f"robot '{kind}' for recipe '{recipe.name}'")
        return replace(recipe, robot=kind, robot_config=config)


def with_policy(recipe: Recipe, choice: PolicyChoice, settings: Sequence[str] = ()) -> Recipe:
    """`recipe` with the policy of `choice`, its training and pace as `PolicyDefaults` wants them unless `settings`
    (`fleet.config.settings`) say otherwise.

    Chunks that are too short for the recipe's `execute_ticks` are replaced when they are half executed. Loads no
    network. Raises `ConfigError` for a policy that cannot be used with the recipe's robot, as far as its files tell.
    """
    wanted = defaults(choice, recipe.spec)
    given = {name: value for name, value in asdict(wanted).items() if value is not None}
    training = {one.name: given[one.name] for one in fields(recipe.training) if one.name in given}
    slow, ticks, speed_up = recipe.slow, recipe.chunking.execute_ticks, recipe.chunking.speed_up
    if wanted.think_every_s is not None:
        slow = replace(slow, every_s=wanted.think_every_s, max_age_s=max(slow.max_age_s, 4 * wanted.think_every_s))
    if wanted.horizon is not None and (usable := wanted.horizon // speed_up) <= ticks:
        ticks = usable // 2
    if ticks < 1:
        raise ConfigError(_too_short(wanted.horizon, 1, recipe, choice))
    tuned = replace(
        recipe,
        training=replace(recipe.training, **training),
        slow=slow,
        chunking=replace(recipe.chunking, execute_ticks=ticks),
        demonstrations=0 if recipe.start else given.get("demonstrations", recipe.demonstrations),
    )
    tuned = with_settings(tuned, settings)

    def check(horizon: int) -> None:
        ticks, speed_up = tuned.chunking.execute_ticks, tuned.chunking.speed_up
        if horizon // speed_up <= ticks:
            raise ConfigError(_too_short(horizon, ticks, tuned, choice))

    def make(spec: RobotSpec, seed: int) -> LearnedPolicy:
        policy = make_policy(choice, spec, seed)
        check(policy.horizon)
        return policy

    if wanted.horizon is not None:
        check(wanted.horizon)
    return replace(tuned, make_policy=make)


def _too_short(horizon: int | None, ticks: int, recipe: Recipe, choice: PolicyChoice) -> str:
    faster = f" at speed-up {recipe.chunking.speed_up}" if recipe.chunking.speed_up > 1 else ""
    return (
        f"policy '{choice}' gives {horizon} actions at a time{faster}, and recipe '{recipe.name}' asks for the next "
        f"chunk after {ticks} ticks: there would be none left while it is made. Take a policy with longer chunks, or a "
        "recipe with fewer execute_ticks."
    )


def read_retention(text: str, usual: Retention) -> Retention:
    """What `--retention` says, `usual` for ''. Raises `ConfigError`."""
    if not text:
        return usual
    try:
        return msgspec.convert(read_json(text, "--retention"), Retention)
    except msgspec.ValidationError as error:
        known = ", ".join(Retention.__struct_fields__)
        raise ConfigError(f"--retention: {error}. It may say: {known}.") from error


def read_staleness(text: str, usual: StalenessBound | None) -> StalenessBound | None:
    """What `--max-lag` says, S, S:WEIGHT or none, `usual` for ''. Raises `ConfigError`."""
    if text in ("", "none"):
        return None if text else usual
    lag, _, weight = text.partition(":")
    try:
        return StalenessBound(int(lag), float(weight or 0.0))
    except ValueError as error:
        raise ConfigError(
            f"--max-lag {text}: say S, in versions, such as 6; S:WEIGHT, such as 6:0.25; or none."
        ) from error


def taken(hint: Any) -> tuple[str, ...]:
    """Which fields of `Overrides` a field with this annotation stands for; none for any other annotation."""
    names: tuple[str, ...] = hint.__metadata__[0] if getattr(hint, "__origin__", None) is Overrides else ()
    return names


def default(one: dataclasses.Field[Any]) -> Any:
    """What a field is when nothing is said."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def as_arguments(name: str, value: Any) -> Collection[str]:
    """One option of a command line."""
    option = name.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    if isinstance(value, list):
        return [word for one in value for word in (f"--{option}", str(one))]
    return f"--{option}", str(value)
