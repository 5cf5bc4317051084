"""The web server of the operator page: `make_app` builds it, `serve` runs it in a thread of the gateway.

Websocket `/ws`. From the page, JSON: see `sessions.PageMessage`. To the page, JSON `fleet`, `error`, `not_held`,
`warning` and `dropped`, and binary pictures: u8 length and UTF-8 of the robot's name, the same of the camera's, then
the JPEG.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from cloud_learner.operator.origin import LOCAL_HOSTS, OriginMiddleware
from cloud_learner.operator.sessions import HEARTBEAT_S, MAX_MESSAGE_BYTES, OperatorSessions, RobotNotClaimedError
from cloud_learner.operator.view import FleetView
from wire.errors import ConfigError, FleetError, ProtocolError, RejectedError
from wire.messages.gateway import OperatorCommand

STATIC = Path(__file__).parent / "static"
SNAPSHOT_PERIOD_S = 0.2
PICTURE_PERIOD_S = 0.05
_EXPIRE_PERIOD_S = 0.05


def make_app(
    view: FleetView,
    *,
    hosts: Iterable[str] = LOCAL_HOSTS,
    any_address: bool = False,
    heartbeat_s: float = HEARTBEAT_S,
    stop: Callable[[OperatorCommand], None] | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> FastAPI:
    """The page of `view`, reachable under the names `hosts` (with `any_address` also by any literal IP address).
    `stop`: as of `OperatorSessions`; `metrics`: what Prometheus gets, by any thread.

    A page that drives a robot and is silent for `heartbeat_s` loses it: the robot gets `drop_link`.
    """
    sessions = OperatorSessions(view, heartbeat_s=heartbeat_s, stop=stop)
    pages: dict[int, WebSocket] = {}
    app = FastAPI(title="vla-fleet", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OriginMiddleware, hosts=tuple(hosts), any_address=any_address)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/api/fleet")
    async def fleet() -> Response:
        body = msgspec.json.encode(view.snapshot() | {"control": sessions.control()})
        return Response(body, media_type="application/json")

    @app.get("/api/run")
    async def run() -> Response:
        return Response(msgspec.json.encode(view.run()), media_type="application/json")

    if metrics is not None:
        # not async: it is made in a thread, and people's commands need not wait for it
        @app.get("/metrics")
        def figures() -> Response:
            return Response(metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.websocket("/ws")
    async def operator(socket: WebSocket) -> None:
        await socket.accept()
        number = sessions.join()
        pages[number] = socket
        view.pages += 1
        # Whichever ends first (the page left, or a send failed) ends the others.
        tasks = [
            asyncio.create_task(_listen(socket, sessions, number)),
            asyncio.create_task(_send_updates(socket, sessions, view, number)),
            asyncio.create_task(_drop_silent_pages(sessions, pages)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del pages[number]
            view.pages -= 1
            sessions.leave(number)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, WebSocketDisconnect):
                raise error

    return app


async def _notify(socket: WebSocket, kind: str, text: str, **more: Any) -> None:
    await socket.send_text(msgspec.json.encode({"type": kind, "text": text, **more}).decode())


async def _listen(socket: WebSocket, sessions: OperatorSessions, number: int) -> None:
    """Handle every message of a page and answer what is rejected, until the page leaves."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        try:
            warning = sessions.handle_message(number, message.get("text") or message.get("bytes") or "")
        except (ProtocolError, RejectedError) as error:
            await _notify(socket, "not_held" if isinstance(error, RobotNotClaimedError) else "error", str(error))
        else:
            if warning:
                await _notify(socket, "warning", warning)


async def _send_updates(socket: WebSocket, sessions: OperatorSessions, view: FleetView, number: int) -> None:
    """Push snapshots and new pictures. A slow page gets fewer of them, always the newest."""
    serial = 0
    sent: dict[str, int] = {}
    next_snapshot_s = 0.0
    while True:
        now_s = time.monotonic()
        for reason in sessions.pop_rejections(number):
            await _notify(socket, "error", reason)
        if now_s >= next_snapshot_s:
            next_snapshot_s = now_s + SNAPSHOT_PERIOD_S
            snapshot = view.snapshot()
            for name in ("curve", "events"):  # long, and mostly what the page already has
                revision = snapshot[f"{name}_revision"]
                if sent.get(name) == revision:
                    del snapshot[name]
                sent[name] = revision
            now = {"gateway_ms": sessions.now_ns() / 1e6}  # last: the page takes it for the moment of sending
            message = {"type": "fleet", "you": number, "control": sessions.control(number), **snapshot, **now}
            await socket.send_text(msgspec.json.encode(message).decode())
        serial, pictures = view.previews(serial)
        for robot, camera, jpeg in pictures:
            await socket.send_bytes(picture_message(robot, camera, jpeg))
        await asyncio.sleep(PICTURE_PERIOD_S)


async def _drop_silent_pages(sessions: OperatorSessions, pages: dict[int, WebSocket]) -> None:
    """Drop the robots of silent pages. Apart from `_send_updates`, because sending to a frozen page may block."""
    while True:
        due_s = time.monotonic() + _EXPIRE_PERIOD_S
        await asyncio.sleep(_EXPIRE_PERIOD_S)
        if time.monotonic() > due_s + _EXPIRE_PERIOD_S:
            continue  # this process was the late one: read first what the pages sent meanwhile
        for number, robots in sessions.expire().items():
            names = ", ".join(robots)
            text = f"The link to this page was too slow, so {names} holds. Take over again or hand back."
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # that page is closing: it needs no notice
                await _notify(pages[number], "dropped", text, robots=robots)


def picture_message(robot: str, camera: str, jpeg: bytes) -> bytes:
    """One picture as the page gets it. Names are cut at 255 bytes."""
    names = b"".join(bytes([len(name)]) + name for name in (robot.encode()[:255], camera.encode()[:255]))
    return names + jpeg


class Server:
    """A running page. `close` may be called twice."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, url: str) -> None:
        self.url = url
        self._server = server
        self._thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="operator-page", daemon=True
        )
        self._thread.start()
        deadline_s = time.monotonic() + 30
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise FleetError(f"The operator page did not start at {url}: see the log above for uvicorn's reason.")
            time.sleep(0.01)

    def close(self) -> None:
        """Stop serving: open pages are closed, so their robots get `drop_link`."""
        self._server.should_exit = True
        self._thread.join(timeout=5)


def serve(
    view: FleetView,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    stop: Callable[[OperatorCommand], None] | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> Server:
    """Serve the page of `view` in a daemon thread; port 0 takes a free one. `stop`, `metrics`: as of `make_app`.

    There is no log-in: whoever reaches the port can move robots, so let `host` be this machine or a network you trust.
    Raises `ConfigError` when the address cannot be used.
    """
    listener = _listen_on(host, port)
    port = listener.getsockname()[1]
    wildcard = host in ("", "0.0.0.0", "::")
    hosts = [*LOCAL_HOSTS, socket.gethostname(), host]
    app = make_app(view, hosts=hosts, any_address=wildcard, heartbeat_s=heartbeat_s, stop=stop, metrics=metrics)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # pictures are compressed already
        timeout_graceful_shutdown=2,
    )
    shown = "localhost" if wildcard else f"[{host}]" if ":" in host else host
    return Server(uvicorn.Server(config), listener, f"http://{shown}:{port}")


def _listen_on(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65_535:
        raise ConfigError(f"The operator page: there is no port {port}; choose one up to 65535 with --web-port.")
    try:
        family, *_, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"The operator page cannot listen on '{host}', port {port}: {error}. Fix --web-host."
        ) from error
    try:
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is used by another program; stop that or choose another port with --web-port"
        elif error.errno == errno.EACCES:
            why = "may not be used by this account; choose one above 1023 with --web-port"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = f"cannot be opened, as '{host}' is no address of this machine; fix --web-host"
        else:
            why = f"cannot be opened: {error}; choose another with --web-port"
        raise ConfigError(f"The operator page: port {port} on {host} {why}.") from error
