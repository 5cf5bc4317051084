"""What each process of a fleet is told: one class each, which stands for its options on every way.

The command line makes one (`fleet.cli.options.command`), the process gets it whole, and `arguments` turns it into the
command line of another process. So an option is spelt once, here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from cloud_learner.buffer.maintenance.retention import Retention
from cloud_learner.rollout.config import RolloutConfig
from fleet.config import recipes
from fleet.config.overrides import Overrides, as_arguments, default, read_retention, read_staleness, taken, unset
from hal.stop_devices.config import COMMANDS, StopDevicesConfig
from wire.errors import ConfigError

PORT = 5760
WEB_PORT = 8080
THINK_PORT = 5761
RELAY_PORT = 5763
SETTINGS = ("set_",)
POLICY = ("policy", "policy_config", *SETTINGS)
SIMULATED = ("strategy", "delay", "speed_up", *POLICY)
"""overrides that leave the recipe's robot as it is"""
LEARNING = ("algorithm", "from_", *POLICY)
EPISODES = ("reset_by", "judged_by", "reset_time_s", "episode_time_s")
NOTHING = Overrides()
_ALWAYS = ("name", "recipe", "gateway")
"""what is told even where it is the default: people and tools find processes by it"""
_FIRST = ("name", "data")
"""what tells one process from another: a fork shows no more words than its parent has room for"""

Recipe = Annotated[str, typer.Option(help="Which job: a name from `vla-fleet recipes`, or module:function.")]
Config = Annotated[
    Path | None, typer.Option(help="What a recipe of real robots is made from: FILE.toml (docs/robots.md).")
]
Data = Annotated[Path | None, typer.Option(help="Data directory; default data/RECIPE.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
Address = Annotated[str, typer.Option(help="The gateway, tcp://HOST:PORT.")]
Keys = Annotated[Path | None, typer.Option(help="Key directory; default DATA/keys.")]
Name = Annotated[str, typer.Option(help="Name of this process; its key is filed under it.")]
RetentionText = Annotated[
    str,
    unset(
        'What the buffer forgets by itself: JSON or a JSON file, such as {"max_bytes": 2e11}; default: as the recipe '
        "says, usually nothing."
    ),
]
MaxLag = Annotated[
    str,
    unset(
        "S: how many versions what the policy did may be behind when it arrives. S leaves out what is further behind, "
        "S:WEIGHT weighs it down, none bounds nothing; default: as the recipe says, usually none. What people do and "
        "demonstrations are never stale.",
        metavar="S[:WEIGHT]",
    ),
]
Canary = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the robots that try a new version first, at least one robot, otherwise rounded down; it is "
        "promoted or rolled back by how they do. 0: all robots at once.",
    ),
]
GateSuccess = Annotated[
    float,
    typer.Option(
        metavar="MARGIN",
        help="Share of held-out episodes, such as 0.1: robots act by a new version only once an evaluator has shown "
        "that it is not worse by that than the one it would replace. 0: what evaluators measure decides nothing.",
    ),
]
Operator = Annotated[bool, typer.Option(help="Whether the scripted operator corrects.")]
Core = Annotated[int | None, typer.Option(min=0, show_default=False, help="Only core of this process of the robot.")]
Site = Annotated[str, unset("Where the robot stands, for jobs that ask for it.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port for robots; 0 takes a free one.")]
MetricsPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port for Prometheus, which asks for /metrics; 0: none.")
]
MetricsHost = Annotated[str, typer.Option(help="Address that port is opened on.")]


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Of every process."""

    recipe: Recipe = "pixels"
    config: Config = None
    data: Data = None

    @property
    def root(self) -> Path:
        """The data directory: the one that was given, else data/RECIPE, which a member has in common with its job."""
        return self.data if self.data is not None else Path("data") / self.recipe.partition("@")[0].replace(":", ".")

    def make_recipe(self, seed: int = 0) -> recipes.Recipe:
        """The recipe that these options name. Raises `ConfigError`."""
        return recipes.get_recipe(self.recipe, seed, self.config)

    def arguments(self) -> list[str]:
        """The same as words of a command line; what the command takes as it is by default is left out."""
        return [word for name, value in self._given() for word in as_arguments(name, value)]

    def _given(self) -> Iterator[tuple[str, Any]]:
        hints = get_type_hints(type(self), include_extras=True)
        for one in sorted(dataclasses.fields(self), key=lambda one: one.name not in _FIRST):
            value = getattr(self, one.name)
            if isinstance(value, Overrides):
                yield from value.given(taken(hints[one.name]))
            elif one.name in _ALWAYS or value != default(one):
                yield one.name, value


@dataclass(frozen=True, kw_only=True)
class ClientOptions(ProcessOptions):
    """Of every process that connects to the gateway."""

    gateway: Address = f"tcp://127.0.0.1:{PORT}"
    keys: Keys = None

    @property
    def key_directory(self) -> Path:
        return self.keys or self.root / "keys"


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(ProcessOptions):
    port: Port = PORT
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1"
    stop_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port for stops alone, which must be open where --port is; 0 takes a free one; default: two above "
            "--port, a free one where that is 0.",
        ),
    ] = None
    web_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")] = WEB_PORT
    web_host: Annotated[str, typer.Option(help="Address the page listens on.")] = "127.0.0.1"
    ledger: Annotated[str, unset("PostgreSQL URL of the ledger; default: a file in DATA.")] = ""
    store: Annotated[str, unset("Object store for shards, s3://BUCKET/PREFIX; default: DATA.")] = ""
    gateway_name: Annotated[
        str, unset("What this gateway is called among those that share a ledger; default: as its machine.")
    ] = ""
    retention: RetentionText = ""
    canary: Canary = 0.0
    gate_success: GateSuccess = 0.0
    overrides: Annotated[Overrides, SETTINGS] = NOTHING

    def rollout(self, usual: RolloutConfig) -> RolloutConfig:
        """How versions come to act: `usual`, but for what was asked. Raises `ConfigError`."""
        asked = {"canary": self.canary, "gate_success": self.gate_success}
        return msgspec.structs.replace(usual, **{name: share for name, share in asked.items() if share})

    def resolved(self, recipe: recipes.Recipe) -> recipes.Recipe:
        """`recipe` with what these options say of it. Raises `ConfigError`."""
        retention = read_retention(self.retention, recipe.retention)
        return dataclasses.replace(recipe, retention=retention, rollout=self.rollout(recipe.rollout))

    @property
    def heard_stop_port(self) -> int:
        """Where stops are heard, 0: at a free port."""
        if self.stop_port is not None:
            return self.stop_port
        return self.port + 2 if 0 < self.port <= 65533 else 0


@dataclass(frozen=True, kw_only=True)
class UpOptions(GatewayOptions):
    """Of `up`, which runs all of them."""

    robots: Annotated[
        str,
        unset(
            "How many simulated robots; default 3. Of a recipe with members: so many of each, or MEMBER:N,MEMBER:N; "
            "default one of each.",
            metavar="N",
        ),
    ] = ""
    """'': the usual number, or what the cluster's nodes have"""
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many minutes of robots at work; default: at Ctrl-C.")
    ] = None
    seed: Seed = 0
    headless: Annotated[bool, typer.Option("--headless", help="Lines instead of a live table.")] = False
    report: Annotated[Path | None, typer.Option(help="Write what was measured to this JSON file.")] = None
    measure_at: Annotated[
        list[float],
        typer.Option(
            min=0.0,
            metavar="MIN",
            show_default=False,
            help="For the report, also measure what is the newest version after MIN minutes, once the run is over; may "
            "be repeated.",
        ),
    ] = field(default_factory=list)
    operator: Operator = True
    backend: Annotated[
        str, typer.Option(help="Where parts run: local (children of this process) or ray (nodes of a Ray cluster).")
    ] = "local"
    ray_address: Annotated[str, unset("The Ray cluster: auto or HOST:PORT; default: one of this machine alone.")] = ""
    host: Annotated[str, unset("Address the gateway listens on; default 127.0.0.1, with Ray this node's.")] = ""
    max_lag: MaxLag = ""
    think_server: Annotated[bool, typer.Option("--think-server", help="Robots think in one think server.")] = False
    overrides: Annotated[Overrides, ("algorithm", "from_", *SIMULATED)] = NOTHING

    def resolved(self, recipe: recipes.Recipe) -> recipes.Recipe:
        recipe = super().resolved(recipe)
        return dataclasses.replace(recipe, staleness=read_staleness(self.max_lag, recipe.staleness))

    def check(self) -> None:
        """Raises `ConfigError` for options that contradict each other, and for a retention or lag that cannot be."""
        read_retention(self.retention, Retention())
        read_staleness(self.max_lag, None)
        self.rollout(RolloutConfig())
        if self.backend not in ("local", "ray"):
            raise ConfigError(f"--backend {self.backend}: there are local and ray.")
        if self.backend == "local" and self.ray_address:
            raise ConfigError(f"--ray-address {self.ray_address} needs --backend ray.")
        if self.ray_address and self.robots:
            raise ConfigError(
                f"--robots {self.robots} with --ray-address {self.ray_address}: the cluster's nodes say which robots "
                "there are. Leave --robots out, and start nodes with `vla-fleet ray-node --robots NAME,NAME`."
            )
        if self.measure_at and self.report is None:
            raise ConfigError("--measure-at needs --report FILE: versions are measured for the report.")
        late = [minute for minute in self.measure_at if self.minutes is None or minute > self.minutes]
        if late:
            raise ConfigError(f"--measure-at {late[0]:g}: the run must take that long; set --minutes to at least that.")


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(ClientOptions):
    name: Name = "trainer"
    seed: Seed = 0
    max_steps: Annotated[int, typer.Option(help="Stop learning after so many gradient steps; 0: never.")] = 0
    max_lag: MaxLag = ""
    snapshot: Annotated[str, unset("Train on what this snapshot holds and on nothing later; default: on all.")] = ""
    metrics_port: MetricsPort = 0
    metrics_host: MetricsHost = "127.0.0.1"
    overrides: Annotated[Overrides, LEARNING] = NOTHING


@dataclass(frozen=True, kw_only=True)
class EvaluatorOptions(ClientOptions):
    name: Name = "evaluator"
    seed: Seed = 0
    version: Annotated[int, typer.Option(help="Measure only this version, then end; 0: the newest, steadily.")] = 0
    label: Annotated[str, typer.Option(help="With --version: before, after or any word.")] = "once"
    overrides: Annotated[Overrides, SIMULATED] = NOTHING


@dataclass(frozen=True, kw_only=True)
class DemonstratorOptions(ClientOptions):
    name: Name = "demonstrator"
    first_seed: Annotated[int, typer.Option(help="Seed of the first demonstration.")] = 0
    episodes: Annotated[int, typer.Option(help="How many in all; 0: as the recipe says.")] = 0
    overrides: Annotated[Overrides, SETTINGS] = NOTHING


@dataclass(frozen=True, kw_only=True)
class TryPolicyOptions(ProcessOptions):
    seed: Seed = 0
    overrides: Annotated[Overrides, ("algorithm", "speed_up", *POLICY)] = NOTHING


@dataclass(frozen=True, kw_only=True)
class ThinkServerOptions(ClientOptions):
    port: Port = THINK_PORT
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1"
    versions: Annotated[
        int,
        typer.Option(
            min=2,
            help="Most versions to think with at once, each with a policy's memory: what is current, tried, the "
            "reference, pinned or a shadow, and one more, so that robots switch without a gap.",
        ),
    ] = 4
    overrides: Annotated[Overrides, POLICY] = NOTHING


@dataclass(frozen=True, kw_only=True)
class RelayOptions(ClientOptions):
    name: Name = "relay"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for robots; 0 takes a free one.")] = RELAY_PORT
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1"
    cache_mb: Annotated[int, typer.Option(min=1, help="Megabytes of memory for chunks of versions.")] = 512
    uploads: Annotated[
        bool, typer.Option(help="Whether robots' segments are kept here, in DATA, until the gateway has them.")
    ] = True
    spool_max: Annotated[
        float,
        typer.Option(
            metavar="GB",
            help="Gigabytes that they may take on this computer's disk; 0: half of what is free, 20 at most. When they "
            "do, robots send to the gateway.",
        ),
    ] = 0.0
    hold_cameras: Annotated[
        str,
        unset(
            "Cameras whose pictures stay here until the learner or `vla-fleet buffer ask` wants them: names with "
            "commas between, or all; default: none. The oldest go when the room is needed.",
            metavar="CAMERA,...",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(ClientOptions):
    """Of a robot's supervisor."""

    name: Name = "robot-0"
    join: Annotated[
        str,
        unset(
            "Join the fleet first, by what `vla-fleet keys token ROBOT` printed on the gateway's machine: this "
            "computer makes its own key, under the robot's name that the token says."
        ),
    ] = ""
    operator: Operator = True
    think: Annotated[
        str, unset("A think server, tcp://HOST:PORT, that runs the slow path; default: this computer.")
    ] = ""
    relay: Annotated[
        str,
        unset("The site's `vla-fleet relay`, tcp://HOST:PORT, which is asked for weights first; its key: `relay`."),
    ] = ""
    site: Site = ""
    stop_key: Annotated[
        list[str],
        typer.Option(
            metavar="DEVICE[:KEY]",
            show_default=False,
            help="Stop by this pedal or key: a path, a name in /dev/input/by-id or the device's own, such as "
            "/dev/input/event3:KEY_B; may be repeated.",
        ),
    ] = field(default_factory=list)
    stop_line: Annotated[
        list[str],
        typer.Option(
            metavar="CHIP:LINE[:active-low]",
            show_default=False,
            help="Stop when the normally closed contact at a GPIO line opens, such as gpiochip0:17; may be repeated.",
        ),
    ] = field(default_factory=list)
    key: Annotated[
        list[str],
        typer.Option(
            metavar="DEVICE:KEY=COMMAND",
            show_default=False,
            help=f"A key that says one of {', '.join(COMMANDS)}; may be repeated.",
        ),
    ] = field(default_factory=list)
    speed_limit: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Move at most at this share of the velocity limits, above 0 up to 1; `vla-fleet speed` slows further.",
        ),
    ] = 1.0
    spool_max: Annotated[
        float,
        typer.Option(
            metavar="GB",
            help="Gigabytes that what waits for the gateway may take on this computer's disk; 0: half of what is free, "
            "20 at most. Over that, episodes of the policy alone are dropped, oldest first.",
        ),
    ] = 0.0
    cpu_control: Core = None
    cpu_driver: Core = None
    metrics_port: MetricsPort = 0
    metrics_host: MetricsHost = "127.0.0.1"
    overrides: Annotated[Overrides, (*SIMULATED, "robot", "robot_config", *EPISODES)] = NOTHING

    @property
    def stop_devices(self) -> StopDevicesConfig:
        """What is watched beside the robot. Raises `ConfigError` for what cannot be understood."""
        return StopDevicesConfig(tuple(self.stop_key), tuple(self.stop_line), tuple(self.key))


@dataclass(frozen=True, kw_only=True)
class EdgePartOptions(EdgeOptions):
    """Of one process of a robot."""

    part: Annotated[str, typer.Argument(help="robot, control, inference, shadow, thinker or uplink")]
    run_dir: Annotated[Path, typer.Option(hidden=True)]
