"""Pictures for people: few, never stored, and none where the line is slow."""

from __future__ import annotations

from robot_edge.uplink.gateway_link import GatewayLink
from robot_edge.uplink.segments import encode_jpeg
from wire.messages.gateway import Preview
from wire.messages.local import FrameRecorded

_DRIVEN_PAUSE_S = 0.1
"""while a person drives"""
_LARGER_NS = 1_000_000_000
"""for so long after a larger picture no small one is sent in its place"""


class PreviewSender:
    """Sends one picture of each camera every so often."""

    def __init__(self, robot: str, link: GatewayLink) -> None:
        self.pause_s = 1.0
        """between two pictures of a camera, as the gateway says"""
        self._robot, self._link = robot, link
        self._shown_ns: dict[str, int] = {}
        self._larger_ns: dict[str, int] = {}

    def show(self, message: FrameRecorded, jpeg: bytes | None, driven: bool) -> None:
        """Send it if one is due. `jpeg`: its image, where that is encoded already; `driven`: a person drives by it."""
        camera, frame = message.camera, message.frame
        if frame.preview is not None:
            self._larger_ns[camera] = frame.time_ns
        shown_ns, pause_s = self._shown_ns.get(camera), _DRIVEN_PAUSE_S if driven else self.pause_s
        if shown_ns is not None and frame.time_ns - shown_ns < 1e9 * pause_s:
            return
        if not self._link.open or self._link.slow:
            return
        if frame.preview is not None:
            jpeg = encode_jpeg(frame.preview, 80)
        elif 0 <= frame.time_ns - self._larger_ns.get(camera, -_LARGER_NS) < _LARGER_NS:
            return
        self._shown_ns[camera] = frame.time_ns
        self._link.send_preview(Preview(self._robot, camera, frame.time_ns, jpeg or encode_jpeg(frame.image, 80)))
