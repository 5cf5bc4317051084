"""Start what the robots learn from: gateway with the operator page, trainer and evaluator.

ros2 launch vla_fleet learner.launch.py recipe:=pixels data:=/srv/vla-fleet host:=0.0.0.0 names:="robot_0 robot_1"

Keys are made first for all of them and for the robots in `names`; existing ones stay. With demonstrate:=true the
recipe's demonstrations are recorded, which a fresh data directory needs once.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, RegisterEventHandler
from launch.event_handlers import OnProcessExit
from launch.substitutions import LaunchConfiguration
from launch_ros.substitutions import ExecutableInPackage

ARGUMENTS = {
    "recipe": ("pixels", "which robot and policy: a name from `vla-fleet recipes`, or module:function"),
    "config": ("", "what a recipe of real robots is made from, FILE.toml"),
    "data": ("vla-fleet-data", "directory that keeps everything the fleet knows"),
    "names": ("", "robots that may connect, separated by spaces; their keys are made"),
    "teaches": ("", "what is learned from them by their own word: script, beside or demonstrations; default: nothing"),
    "host": ("127.0.0.1", "address the gateway listens on for robots"),
    "port": ("5760", "its port"),
    "web_host": ("127.0.0.1", "address the operator page listens on; it has no log-in"),
    "web_port": ("8080", "its port"),
    "ledger": ("", "PostgreSQL URL of the ledger; default: a file in DATA"),
    "store": ("", "object store for shards, s3://BUCKET/PREFIX; default: DATA"),
    "policy": ("", "another policy than the recipe's, KIND:NAME, such as lerobot:DIRECTORY"),
    "policy_config": ("", "that policy's configuration: a JSON file, or JSON"),
    "algorithm": ("", "another algorithm, one of docs/algorithms.md or module:Config; default: the recipe's"),
    "max_lag": ("", "how many versions what the policy did may be behind when it arrives, S or S:WEIGHT; default: any"),
    "seed": ("0", "seed of everything that is drawn"),
    "trainer": ("true", "start a trainer here"),
    "evaluator": ("true", "start an evaluator here"),
    "demonstrate": ("false", "record the recipe's demonstrations"),
}

STOP_S = "30"
"""the trainer saves before it ends"""


def generate_launch_description() -> LaunchDescription:
    """The arguments, then the processes they ask for."""
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, (default, text) in ARGUMENTS.items()
            ),
            OpaqueFunction(function=_processes),
        ]
    )


def _processes(context):
    given = {name: LaunchConfiguration(name).perform(context) for name in ARGUMENTS}
    names = ("trainer", "evaluator", "demonstrator", *given["names"].split())
    keys = _process("keys", *names, *_options(given, "teaches"), "--keys", f"{given['data']}/keys")
    common = ["--recipe", given["recipe"], "--data", given["data"], *_options(given, "config")]
    # A gateway that listens on every address is reached by its own machine on this one.
    near = "127.0.0.1" if given["host"] in ("0.0.0.0", "*") else given["host"]
    remote = [*common, "--gateway", f"tcp://{near}:{given['port']}"]
    listens = _options(given, "host", "port", "web_host", "web_port", "ledger", "store")
    learns = _options(given, "policy", "policy_config", "seed")
    started = [_process("gateway", *common, *listens, lasts=True)]
    if _yes(given["demonstrate"]):
        started.append(_process("demonstrate", *remote))
    for name in ("trainer", "evaluator"):
        if _yes(given[name]):
            bounds = _options(given, "max_lag", "algorithm") if name == "trainer" else []
            started.append(_process(name, *remote, *learns, *bounds, lasts=True))
    return [RegisterEventHandler(OnProcessExit(target_action=keys, on_exit=started)), keys]


def _options(given, *names):
    """Those that were given something, as words of a command line."""
    return [word for name in names if given[name] for word in (f"--{name.replace('_', '-')}", given[name])]


def _process(command, *options, lasts=False):
    """`vla-fleet COMMAND ...`, started again when it dies if it `lasts`."""
    return ExecuteProcess(
        cmd=[ExecutableInPackage(executable="vla-fleet", package="vla_fleet"), command, *options],
        name=command,
        output="screen",
        respawn=lasts,
        respawn_delay=2.0,
        sigterm_timeout=STOP_S,
    )


def _yes(text):
    return text.lower() in ("true", "1", "yes")
