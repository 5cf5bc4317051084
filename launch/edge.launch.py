"""Start one robot's edge on the robot's computer: a managed node that keeps driver, control, inference and uplink.

ros2 launch vla_fleet edge.launch.py namespace:=robot_0 gateway:=tcp://gateway-host:5760 keys:=/etc/vla-fleet/keys

Kilted, Jazzy and Humble. With autostart:=true the node takes itself through its life cycle and tries again when that or
the edge fails. It does not wait for events of this launch file: after a crash discovery still shows the services of the
dead node for some twenty seconds, and a transition asked of those is lost. With autostart:=false a lifecycle manager or
a launch file that includes this one, emits `launch_ros.events.lifecycle.ChangeState`.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue

PARAMETERS = {
    "name": (str, "", "name of this robot, under which its key is filed; default: the last part of the namespace"),
    "gateway": (str, "tcp://127.0.0.1:5760", "address of the gateway"),
    "recipe": (str, "pixels", "which robot and policy: a name from `vla-fleet recipes`, or module:function"),
    "config": (str, "", "what a recipe of real robots is made from, FILE.toml"),
    "keys": (str, "", "directory with this robot's key and the gateway's public key; default: DATA/keys"),
    "data": (str, "", "directory for the spool, the weight cache and logs; default: ~/.ros/vla_fleet/RECIPE"),
    "site": (str, "", "where the robot stands"),
    "stop_keys": (str, "", "pedals or keys that stop the robot, DEVICE[:KEY]; several with commas"),
    "stop_lines": (str, "", "GPIO lines that stop it, CHIP:LINE[:active-low]; several with commas"),
    "command_keys": (str, "", "keys that command it, DEVICE:KEY=COMMAND; several with commas"),
    "speed_limit": (float, "1.0", "share of its velocity limits at which the robot moves at most"),
    "spool_max": (float, "0.0", "gigabytes that what waits for the gateway may take on the disk; 0: as is sensible"),
    "cpu_control": (int, "-1", "the only core that control runs on; -1: any but the first"),
    "cpu_driver": (int, "-1", "the only core that the robot's driver runs on; -1: any but the first"),
    "metrics_port": (int, "0", "port for Prometheus, which asks for /metrics; 0: none"),
    "metrics_host": (str, "127.0.0.1", "address that port is opened on"),
    "operator": (bool, "false", "whether the scripted operator corrects, for simulated robots that have one"),
    "strategy": (str, "", "how actions that come late are dealt with; default: the recipe's"),
    "delay": (str, "", "inject latency in control ticks"),
    "speed_up": (int, "0", "execute every q-th action; 0: as the recipe says"),
    "think": (str, "", "address of a think server that runs the slow path; default: this computer"),
    "robot": (str, "", "another driver for the recipe's robot, such as ros2"),
    "robot_config": (str, "", "that driver's configuration, with `safety` its limits: JSON, or a JSON or TOML file"),
    "policy": (str, "", "another policy than the recipe's, KIND:NAME, such as lerobot:DIRECTORY"),
    "policy_config": (str, "", "that policy's configuration: a JSON file, or JSON"),
    "reset_by": (str, "", "who resets the scene: person or robot; default: a person, if the robot is real"),
    "judged_by": (str, "", "who says how episodes ended: person or robot; default: a person, if the robot is real"),
    "reset_time_s": (float, "0.0", "seconds for the scene, then the next episode begins; 0: when it is told to"),
    "episode_time_s": (float, "0.0", "seconds an episode may last, whoever drives; 0: as the recipe says"),
    "wait_for_robot_s": (float, "30.0", "how long configure waits for the topics of a ROS 2 robot, in seconds"),
    "give_up_after": (int, "8", "deaths in a row of one edge process after which the node goes to its error state"),
    "autostart": (bool, "true", "configure and activate without being asked, and again after an error"),
}
"""parameters of the node: type, default and meaning"""

OTHERS = {
    "namespace": ("", "namespace of the node and of the robot's topics"),
    "respawn": ("true", "start the node again when its process dies"),
    "fastdds_profile": ("", "Fast DDS profile (XML) for the robot's topics; default: the one that is shipped"),
    "log_level": ("info", "debug, info, warn, error or fatal"),
}

STOP_S = "30"
"""an edge that ends brings what it recorded to the gateway first"""


def generate_launch_description() -> LaunchDescription:
    """The arguments and the node."""
    node = LifecycleNode(
        package="vla_fleet",
        executable="edge_node",
        name="edge_node",
        namespace=LaunchConfiguration("namespace"),
        parameters=[
            {
                name: ParameterValue(LaunchConfiguration(name), value_type=kind)
                for name, (kind, *_) in PARAMETERS.items()
            }
        ],
        arguments=["--ros-args", "--log-level", LaunchConfiguration("log_level")],
        output="screen",
        respawn=LaunchConfiguration("respawn"),
        respawn_delay=2.0,
        sigterm_timeout=STOP_S,
    )
    arguments = [
        *((name, default, text) for name, (_, default, text) in PARAMETERS.items()),
        *((name, default, text) for name, (default, text) in OTHERS.items()),
    ]
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, default, text in arguments
            ),
            OpaqueFunction(function=_profile),
            node,
        ]
    )


def _profile(context):
    """Both names: the second is that of Fast DDS before 3.0 (Jazzy, Humble)."""
    path = LaunchConfiguration("fastdds_profile").perform(context)
    names = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE") if path else ()
    return [SetEnvironmentVariable(name, path) for name in names]
