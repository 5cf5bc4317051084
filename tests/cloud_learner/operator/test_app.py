from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from cloud_learner.operator.app import make_app, serve
from cloud_learner.operator.origin import OriginMiddleware
from cloud_learner.operator.view import FleetView
from tests.cloud_learner.operator.fakes import arm_spec, edge_status
from wire.errors import ConfigError
from wire.messages.gateway import OperatorCommand, Preview

OWN = {"origin": "http://localhost", "host": "localhost"}


@pytest.fixture
def view() -> FleetView:
    view = FleetView()
    for name in ("r1", "r2"):
        view.add_robot(name, arm_spec())
        view.update_status(edge_status(name))
    return view


@pytest.fixture
def client(view: FleetView) -> Iterator[TestClient]:
    with TestClient(make_app(view, heartbeat_s=60), base_url="http://localhost") as client:
        yield client


def next_of(page: WebSocketTestSession, kind: str) -> dict:
    """The next message of `kind`, past pictures and snapshots."""
    for _ in range(200):
        message = page.receive()
        if message.get("text"):
            data = json.loads(message["text"])
            if data["type"] == kind:
                return data
    raise AssertionError(f"no {kind} in 200 messages")


def wait_for_command(view: FleetView, kind: str) -> OperatorCommand:
    """The next command of `kind`; other commands before it are dropped."""
    for _ in range(500):
        for command in view.pop_commands():
            if command.kind == kind:
                return command
        time.sleep(0.01)
    raise AssertionError(f"no {kind} in 5 s")


def test_page_and_its_parts_are_served(client: TestClient):
    page = client.get("/")
    assert page.status_code == 200
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for name in (
        "app.js",
        "card.js",
        "chart.js",
        "clock.js",
        "dom.js",
        "drive.js",
        "versions.js",
        "style.css",
        "icon.svg",
    ):
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200, name
        assert "http://" not in answer.text.replace("http://www.w3.org/", ""), f"{name} loads from elsewhere"
    assert "javascript" in client.get("/static/app.js").headers["content-type"]
    assert client.get("/static/../app.py").status_code == 404


def test_fleet_as_json(client: TestClient):
    fleet = client.get("/api/fleet").json()
    assert [robot["name"] for robot in fleet["robots"]] == ["r1", "r2"]
    assert fleet["control"] == {}


def test_snapshots_and_pictures_are_pushed(client: TestClient, view: FleetView):
    view.update_preview(Preview("r1", "front", 0, b"\xff\xd8jpeg"))
    with client.websocket_connect("/ws", headers=OWN) as page:
        first = next_of(page, "fleet")
        assert view.pages
        assert "curve" in first
        assert [robot["name"] for robot in first["robots"]] == ["r1", "r2"]
        while "bytes" not in (message := page.receive()):
            pass
        assert message["bytes"] == b"\x02r1\x05front\xff\xd8jpeg"
        later = next_of(page, "fleet")
        assert "curve" not in later, "an unchanged curve is not sent again"
        view.add_event("info", "hello")
        while "events" not in (later := next_of(page, "fleet")):
            pass
        assert later["events"][-1]["text"] == "hello"
    assert not view.pages


def test_two_pages_and_one_robot(client: TestClient, view: FleetView):
    with client.websocket_connect("/ws", headers=OWN) as mine:
        with client.websocket_connect("/ws", headers=OWN) as other:
            mine.send_json({"type": "take_over", "robot": "r1"})
            assert wait_for_command(view, "take_over").robot == "r1"
            other.send_json({"type": "command", "robot": "r1", "action": [0, 0, 0, 0]})
            assert "driven from another page" in next_of(other, "error")["text"]
            mine.send_json({"type": "command", "robot": "r1", "action": [0, 0, 0]})
            assert "3 numbers" in next_of(mine, "error")["text"]
            mine.send_json({"type": "command", "robot": "r2", "action": [0, 0, 0, 0]})
            assert "not under your control" in next_of(mine, "not_held")["text"]
            mine.send_text("nonsense")
            assert "not a message" in next_of(mine, "error")["text"]
            while next_of(other, "fleet")["control"] != {"r1": "other"}:
                pass
            assert view.pop_commands() == []
        mine.send_json({"type": "command", "robot": "r1", "action": [1, 0, 0, 0], "captured_ms": 5.0})
        assert wait_for_command(view, "command").action == (1.0, 0.0, 0.0, 0.0)
    assert wait_for_command(view, "drop_link").robot == "r1"


def test_a_page_changes_versions_and_hears_what_is_refused(client: TestClient, view: FleetView):
    with client.websocket_connect("/ws", headers=OWN) as page:
        page.send_json({"type": "versions", "change": "promote", "number": 7})
        for _ in range(500):
            if changes := view.pop_version_changes():
                break
            time.sleep(0.01)
        (change,) = changes
        assert change == (f"web-{next_of(page, 'fleet')['you']}", "promote", 7, "")
        view.reject_version_change(change, "there is no policy version 7.")
        assert next_of(page, "error")["text"] == "there is no policy version 7."
        page.send_json({"type": "versions", "change": "list"})
        assert "what to do with versions" in next_of(page, "error")["text"]


def test_a_silent_page_is_dropped(view: FleetView):
    with TestClient(make_app(view)) as client, client.websocket_connect("/ws", headers=OWN) as page:
        page.send_json({"type": "take_over", "robot": "r1"})
        assert wait_for_command(view, "drop_link").robot == "r1"
        dropped = next_of(page, "dropped")
        assert dropped["robots"] == ["r1"]
        assert "Take over again or hand back" in dropped["text"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost", "origin": "http://evil.example"},
        {"host": "localhost", "origin": "http://localhost:9999"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost"},
        {"origin": "http://evil.example", "host": "evil.example"},
    ],
)
def test_websockets_of_other_sites_are_refused(client: TestClient, headers: dict[str, str]):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers=headers):
        pass


def test_foreign_host_names_are_refused(client: TestClient):
    answer = client.get("/api/fleet", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert "evil.example" in answer.text


def test_which_hosts_are_served():
    local = OriginMiddleware(app=None)  # type: ignore[arg-type]
    anywhere = OriginMiddleware(app=None, hosts=["robots.lan"], any_address=True)  # type: ignore[arg-type]
    for guard, host, good in (
        (local, "localhost:8080", True),
        (local, "[::1]:8080", True),
        (local, "127.0.0.1", True),
        (local, "192.168.1.7", False),
        (local, "", False),
        (local, "localhost:x", False),
        (anywhere, "192.168.1.7:80", True),
        (anywhere, "ROBOTS.lan", True),
        (anywhere, "evil.example", False),
    ):
        assert (guard.rejection(host, f"http://{host}", websocket=True) == "") is good, host


def test_serve_and_close(view: FleetView):
    server = serve(view, port=0)
    try:
        assert server.url.startswith("http://127.0.0.1:")
        assert httpx.get(server.url + "/api/fleet").json()["robots"][0]["name"] == "r1"
    finally:
        server.close()
        server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_a_port_in_use_is_named(view: FleetView):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is used by another program.*--web-port"):
            serve(view, port=port)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [("127.0.0.1", 99_999, "--web-port"), ("203.0.113.9", 0, "no address of this machine; fix --web-host")],
)
def test_addresses_that_cannot_be_used(view: FleetView, host: str, port: int, words: str):
    with pytest.raises(ConfigError, match=words):
        serve(view, host, port)
