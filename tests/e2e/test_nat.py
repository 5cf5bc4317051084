"""A robot behind a router that lets nobody in: it joins, works, is stopped; whichever address changes, it is back."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from benchmarks.soak.fleet import SoakPublisher
from benchmarks.soak.robot import PLACE, RECIPE
from tests.e2e.nat import ADDRESSES, NAME, OUTER, Nat, UnavailableError, nat
from tests.e2e.test_processes import ROOT, robot
from wire.identity.join_tokens import make_token
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.zmq_channel import ZmqClient

pytestmark = pytest.mark.slow

BACK_S = 12.0
"""from a change until the robot is heard again: a connection that is dead is noticed in four seconds, a name that leads
nowhere in three more"""
PORT, STOP_PORT, WEB_PORT = 5760, 5762, 8080


class Site:
    """A robot there, and a gateway that only it can reach."""

    def __init__(self, net: Nat, place: Path) -> None:
        self.net, self.cloud_data = net, place / "cloud"
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []
        make_keys(self.cloud_data / "keys", [GATEWAY, "trainer"])
        self._trainer: SoakPublisher | None = None

    def start(self) -> None:
        listens = ("--host", "0.0.0.0", "--port", str(PORT), "--stop-port", str(STOP_PORT), "--web-port", str(WEB_PORT))
        self._run(self.net.cloud, "gateway", "--data", str(self.cloud_data), *listens)
        token = make_token(self.cloud_data / "keys", "robot-0", 60)
        here = ("--data", str(self._place / "robot"), "--gateway", f"tcp://{NAME}:{PORT}", "--no-operator")
        self.until(lambda: self._get("/api/fleet"), "the gateway is there")
        self._run(self.net.robot, "edge", "--join", token, *here)

    def _run(self, namespace: str, command: str, *words: str) -> None:
        line = [sys.executable, "-m", "fleet.cli", command, "--recipe", RECIPE, *words]
        environment = {**os.environ, PLACE: str(self._place)}
        with (self._place / f"{command}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(self.net.command(namespace, *line), stdout=log, stderr=log, cwd=ROOT, env=environment)
            )

    def publish(self) -> int:
        """The number of a new version."""

        def sent() -> int:
            if self._trainer is None:
                client = ZmqClient(f"tcp://127.0.0.1:{PORT}", "trainer", self.cloud_data / "keys")
                self._trainer = SoakPublisher(client, every_s=0.0)
            before = self._trainer.published
            while self._trainer.published == before:
                self._trainer.poll()
                time.sleep(0.01)
            return self._trainer.published

        return self.net.within(self.net.cloud, sent)

    def say(self, **message: object) -> None:
        """What a page sends."""
        address = f"http://127.0.0.1:{WEB_PORT}"

        def sent() -> None:
            with connect(address.replace("http", "ws") + "/ws", origin=address) as page:  # type: ignore[arg-type]
                page.send(json.dumps({"robot": "robot-0", **message}))
                page.recv(5)

        self.net.within(self.net.cloud, sent)

    def card(self) -> dict[str, Any]:
        return robot(self._get("/api/fleet"), "robot-0")

    @property
    def stored(self) -> int:
        return self._get("/api/fleet")["totals"]["steps_stored"]

    def until(self, true: Callable[[], object], what: str, seconds: float = 120.0) -> float:
        """How long it took."""
        begun_s = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                if true():
                    return time.monotonic() - begun_s
            assert time.monotonic() - begun_s < seconds, f"not within {seconds:g} s: {what}\n{self._logs()}"
            time.sleep(0.05)

    def works(self) -> bool:
        card = self.card()
        return card.get("link") == "ok" and card.get("mode") == "policy"

    def close(self) -> None:
        # the robot first: its uplink waits for whatever the gateway has not taken
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _get(self, path: str) -> Any:
        def got() -> Any:
            with urllib.request.urlopen(f"http://127.0.0.1:{WEB_PORT}{path}", timeout=2) as answer:
                return json.load(answer)

        return self.net.within(self.net.cloud, got)

    def _logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self._place.rglob("*.log"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("nat")
    try:
        with nat(place) as net, contextlib.closing(Site(net, place)) as made:
            made.start()
            yield made
    except UnavailableError as error:
        pytest.skip(f"no network behind a NAT can be made here: {error}")


def stop_and_start(site: Site, within_s: float = 5.0) -> None:
    """A person stops the robot, releases it and starts it again."""
    site.until(site.works, "the robot moves")
    site.say(type="estop")
    site.until(lambda: site.card()["stops"], "it is stopped", within_s)
    site.say(type="release_estop", stop=site.card()["stops"][0]["id"])
    site.until(lambda: site.card()["ready"], "it is released", within_s)
    site.say(type="start", captured_ms=time.monotonic() * 1e3)
    site.until(site.works, "it moves again", 30.0)


def comes_back(site: Site) -> float:
    """Seconds until what it recorded after now is stored."""
    begun = site.stored
    # of what was on its way before, one segment may still have come
    return site.until(lambda: site.stored > begun + 40 and site.works(), "it is back", 60.0)


def test_it_joins_works_and_is_stopped(site: Site) -> None:
    """Nobody can come in: all of it goes over connections that the robot made."""
    site.until(lambda: site.card(), "the robot has joined")
    with pytest.raises(OSError):
        site.net.within(site.net.cloud, lambda: urllib.request.urlopen("http://10.1.0.2:1/", timeout=1))
    version = site.publish()
    site.until(lambda: site.card()["version"] >= version, "it acts by the weights")
    site.until(lambda: site.card()["job"] == "main", "it has a job")
    site.until(lambda: site.stored > 80, "what it records arrives")
    stop_and_start(site)


def test_the_router_forgets_a_connection_and_says_nothing(site: Site) -> None:
    site.until(site.works, "the robot works")
    site.net.forget()
    assert comes_back(site) < BACK_S
    stop_and_start(site)


def test_the_site_has_another_address(site: Site) -> None:
    site.until(site.works, "the robot works")
    site.net.move_router(*OUTER)
    assert comes_back(site) < BACK_S
    stop_and_start(site)


def test_the_gateway_has_another_address(site: Site) -> None:
    """The name leads to the old one for a while, where nobody answers."""
    site.until(site.works, "the robot works")
    site.net.move_cloud(*ADDRESSES, silently=True)
    time.sleep(6.0)
    site.net.name_cloud(ADDRESSES[1])
    assert comes_back(site) < BACK_S
    stop_and_start(site)
