"""Stand-ins for `launch.launch_description_sources`."""

from __future__ import annotations

from typing import Any


class PythonLaunchDescriptionSource:
    def __init__(self, launch_file_path: Any) -> None:
        self.path = launch_file_path
