"""What a camera must offer: the newest picture, without waiting for it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from wire.types import CameraSpec, Frame


@runtime_checkable
class Camera(Protocol):
    """A camera that runs at its own rate beside the control loop; its constructor only stores its configuration."""

    spec: CameraSpec

    def connect(self) -> None:
        """Open it and wait for its first picture. Raises `RobotError` that says what to do."""
        ...

    def read(self) -> Frame:
        """The newest picture, uint8[height, width, 3] RGB, with the time it was captured. Never waits.

        Raises `RobotError` when the camera has failed, which it tries to mend by itself, until it is closed; a camera
        that merely stands still gives its last picture again.
        """
        ...

    def close(self) -> None:
        """Give it back. May be called twice."""
        ...
