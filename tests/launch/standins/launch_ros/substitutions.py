"""Stand-ins for `launch_ros.substitutions`: a package is found where its name says, nothing is looked up."""

from __future__ import annotations

from typing import Any

from launch import LaunchContext
from launch.substitutions import perform


class FindPackageShare:
    def __init__(self, package: Any) -> None:
        self.package = package

    def perform(self, context: LaunchContext) -> str:
        return f"share:{perform(context, self.package)}"


class ExecutableInPackage:
    def __init__(self, executable: Any, package: Any) -> None:
        self.executable, self.package = executable, package

    def perform(self, context: LaunchContext) -> str:
        return f"lib:{perform(context, self.package)}/{perform(context, self.executable)}"
