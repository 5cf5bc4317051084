"""A robot's site behind a router that translates addresses and lets nobody in, in network namespaces of this machine.

    robot 10.1.0.2 ── 10.1.0.1 router 198.51.100.1 ── 198.51.100.10 cloud

The cloud has no route to the site, only to the router's outer address. Needs root, `ip` and `nft`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
NAME = "fleet.example"
"""of the cloud, which the robot finds in a hosts file of its own"""
ADDRESSES = ("198.51.100.10", "198.51.100.20")
"""of the cloud"""
OUTER = ("198.51.100.1", "198.51.100.2")
"""of the router"""


class UnavailableError(Exception):
    """Namespaces or address translation cannot be had here; the message says why."""


class Nat:
    """Three namespaces, as long as `nat` is entered."""

    def __init__(self, directory: Path) -> None:
        number = os.getpid() % 100_000
        self.robot, self.router, self.cloud = (f"vf{part}{number}" for part in ("robot", "router", "cloud"))
        self.hosts = directory / "hosts"
        self._ends = f"vr{number}", f"vi{number}", f"vc{number}", f"vo{number}"
        self._black_holes: set[str] = set()
        self._generation = 1
        self._executors: dict[str, concurrent.futures.ThreadPoolExecutor] = {}

    def build(self) -> None:
        for name in (self.robot, self.router, self.cloud):
            _run("ip", "netns", "add", name)
            self.sh(name, "ip link set lo up")
        robot, inner, cloud, outer = self._ends
        for near, here, far, there in (
            (robot, self.robot, inner, self.router),
            (cloud, self.cloud, outer, self.router),
        ):
            _run("ip", "link", "add", near, "netns", here, "type", "veth", "peer", "name", far, "netns", there)
        for name, end, address in (
            (self.robot, robot, "10.1.0.2"),
            (self.router, inner, "10.1.0.1"),
            (self.router, outer, OUTER[0]),
            (self.cloud, cloud, ADDRESSES[0]),
        ):
            self.sh(name, f"ip addr add {address}/24 dev {end} && ip link set {end} up")
        self.sh(self.robot, "ip route add default via 10.1.0.1")
        self.sh(self.router, "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self.name_cloud(ADDRESSES[0])
        self._filter()

    def name_cloud(self, address: str) -> None:
        """What the robot's computer resolves `NAME` to; written in place, for the file is mounted there."""
        self.hosts.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    def move_cloud(self, old: str, new: str, *, silently: bool) -> None:
        """The cloud has another address. `silently`: what goes to the old one vanishes, and nobody is told."""
        end = self._ends[2]
        if silently:
            self._black_holes.add(old)
            self._filter()
        self.sh(self.cloud, f"ip addr del {old}/24 dev {end} && ip addr add {new}/24 dev {end}")

    def move_router(self, old: str, new: str) -> None:
        """The site has another address outside, as after a night."""
        end = self._ends[3]
        self.sh(self.router, f"ip addr del {old}/24 dev {end} && ip addr add {new}/24 dev {end}")

    def forget(self) -> None:
        """The router knows no connection any more that there was, and says so to nobody."""
        self._generation += 1
        self._filter()

    def command(self, namespace: str, *words: str) -> list[str]:
        """A command line that runs `words` there, with the hosts file that is the robot's."""
        mounted = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", namespace, "unshare", "-m", "sh", "-c", mounted, str(self.hosts), *words]

    def within(self, namespace: str, work: Callable[[], T]) -> T:
        """What `work` returns; the sockets that it opens are there."""
        if namespace not in self._executors:
            self._executors[namespace] = concurrent.futures.ThreadPoolExecutor(1, "nat", _enter, (namespace,))
        return self._executors[namespace].submit(work).result()

    def sh(self, namespace: str, script: str) -> None:
        _run("ip", "netns", "exec", namespace, "sh", "-c", script)

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown()
        for name in (self.robot, self.router, self.cloud):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _filter(self) -> None:
        """A connection is marked with the generation it began in; of older ones nothing passes."""
        outer, holes = self._ends[3], "".join(f"ip daddr {one} drop\n" for one in sorted(self._black_holes))
        old = f"ct mark != {{0, {self._generation}}} drop"
        rules = f"""
            table ip site {{}}
            delete table ip site
            table ip site {{
                chain outwards {{
                    type nat hook postrouting priority srcnat; policy accept;
                    oifname "{outer}" masquerade
                }}
                chain through {{
                    type filter hook forward priority filter; policy drop;
                    {holes}
                    {old}
                    ct state established,related accept
                    iifname != "{outer}" ct state new ct mark set {self._generation} accept
                }}
                chain inwards {{
                    type filter hook input priority filter; policy accept;
                    iifname "{outer}" ct state new drop
                }}
            }}
        """
        _run("ip", "netns", "exec", self.router, "nft", "-f", "-", text=rules)


@contextlib.contextmanager
def nat(directory: Path) -> Iterator[Nat]:
    """Raises `UnavailableError`."""
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root")
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            raise UnavailableError(f"there is no `{tool}` here (Debian and Ubuntu: apt install {package})")
    made = Nat(directory)
    try:
        made.build()
        yield made
    finally:
        made.close()


def _enter(namespace: str) -> None:
    """This thread, and those it starts, are in the namespace from now on."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(words)}` failed: {done.stderr.strip()[-300:]}")
