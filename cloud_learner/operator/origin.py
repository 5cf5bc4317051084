"""Keeps other web sites away from a page that can move robots.

A browser lets any site open a websocket to this machine, and a hostile name server can point a site's own name at
127.0.0.1. So every request must name a host we serve, and a websocket must come from our own page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class OriginMiddleware:
    """ASGI middleware: refuses foreign hosts and foreign origins, and adds the security headers."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = LOCAL_HOSTS, any_address: bool = False) -> None:
        """`hosts` are the names the page may be reached by; with `any_address` also every literal IP address."""
        self._app = app
        self._hosts = {host.lower().strip("[]") for host in hosts}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        reason = self.rejection(headers.get("host", ""), headers.get("origin"), scope["type"] == "websocket")
        if reason:
            reject: ASGIApp = PlainTextResponse(reason + "\n", 403)
            if scope["type"] == "websocket":
                reject = WebSocketClose(1008, reason)
            await reject(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def rejection(self, host: str, origin: str | None, websocket: bool) -> str:
        """Why a request with these headers is refused, '' when it is not."""
        name, port = _split(f"http://{host}")
        if not self._serves(name):
            return f"This page is not served as '{name[:100]}'. Open it by the address that `vla-fleet up` printed."
        if origin is None:
            return "A websocket without an Origin does not come from this page." if websocket else ""
        if websocket and _split(origin) != (name, port):
            return f"A websocket from '{origin[:100]}' does not come from this page."
        return ""

    def _serves(self, name: str) -> bool:
        if name in self._hosts:
            return True
        if not self._any_address:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _split(url: str) -> tuple[str, int]:
    """Host name in lower case and port of `url`; ('', 0) when it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0
    return (parts.hostname or "").lower(), port
