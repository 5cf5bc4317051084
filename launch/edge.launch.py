"""Start one robot's edge (driver, control, inference, uplink) on the robot's computer.

ros2 launch ./launch/edge.launch.py name:=robot-0 gateway:=tcp://gateway-host:5760 keys:=/etc/vla-fleet/keys
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess
from launch.substitutions import LaunchConfiguration

_ARGUMENTS = {
    "name": ("robot-0", "name of this robot; its key is filed under it"),
    "gateway": ("tcp://127.0.0.1:5760", "the gateway's address"),
    "recipe": ("pixels", "which robot and policy: a name from `vla-fleet recipes`"),
    "keys": ("keys", "directory with this robot's key and the gateway's public key"),
    "data": ("vla-fleet-edge", "directory for the spool and the weight cache"),
}


def generate_launch_description() -> LaunchDescription:
    """The arguments above and one process that restarts when it dies."""
    command = ["vla-fleet", "edge"]
    for name in _ARGUMENTS:
        command += [f"--{name}", LaunchConfiguration(name)]
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, (default, text) in _ARGUMENTS.items()
            ),
            ExecuteProcess(cmd=command, output="screen", respawn=True, respawn_delay=2.0),
        ]
    )
