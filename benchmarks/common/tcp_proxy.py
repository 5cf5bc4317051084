"""A bad network between two processes: a TCP port that passes on to another one what a `FaultPlan` lets pass.

A stream loses nothing and keeps its order: what the plan drops is late by what TCP takes to send it again, and it
doubles and reorders nothing. A bit that is turned ends a connection with CURVE. While the link is silent, bytes vanish
and connections look alive; those that lost some end when it is over, for they could not go on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Self

from wire.transport.faults import Fate, FaultPlan, LinkState, turn_bit

_PACKET_BYTES = 1400
_RETRANSMIT_S = 0.2
_MOST_LOSSES = 5
_PACKETS_ON_THE_WAY = 1024
_WATCH_S = 0.02

_Queue = asyncio.Queue[tuple[float, bytes]]
"""(when it is passed on, by the machine's clock; bytes of one packet at most)"""


class TcpProxy:
    """Listens on `port` of the loopback from `with` on; connections are numbered as they come, for their fates."""

    def __init__(self, host: str, port: int, plan: FaultPlan, *, shared: bool = False) -> None:
        """`host`, `port`: where to. The plan is followed from `with` on. `shared`: all connections together have its
        rate, as those behind one uplink, instead of each."""
        self._to = host, port
        self._free_s: dict[str, float] | None = {"up": 0.0, "down": 0.0} if shared else None
        self._plan = plan
        self._begun_s = 0.0
        self._connections: set[_Connection] = set()
        self._count = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="tcp proxy", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self.port = 0

    def __enter__(self) -> Self:
        self._begun_s = time.monotonic()
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def follow(self, plan: FaultPlan) -> None:
        """From now on another plan, from its beginning; connections that are open keep the fates they have."""
        self._plan, self._begun_s = plan, time.monotonic()

    def free_at_s(self, way: str, mine_s: float, now_s: float, took_s: float) -> float:
        """When the line is free again of what takes it `took_s`; `mine_s`: as far as this connection knows."""
        if self._free_s is not None:
            mine_s = self._free_s[way]
        mine_s = max(mine_s, now_s) + took_s
        if self._free_s is not None:
            self._free_s[way] = mine_s
        return mine_s

    def now_s(self) -> float:
        """Since the plan began."""
        return time.monotonic() - self._begun_s

    async def _run(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        watch = asyncio.create_task(self._watch())
        await self._closing.wait()
        watch.cancel()
        server.close()
        for connection in list(self._connections):
            connection.abort()
        while self._connections:
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._count = self._count, self._count + 1
        if self._plan.at(self.now_s()).link is LinkState.cut:
            writer.transport.abort()
            return
        connection = _Connection(self, number, writer)
        self._connections.add(connection)
        try:
            await connection.pass_on(reader, *self._to)
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def _watch(self) -> None:
        """End what the plan says is over."""
        while True:
            await asyncio.sleep(_WATCH_S)
            link = self._plan.at(self.now_s()).link
            for connection in list(self._connections):
                if link is LinkState.cut or (connection.lost and link is not LinkState.silent):
                    connection.abort()

    def plan_at(self, time_s: float) -> tuple[FaultPlan, float]:
        """The plan, and `time_s` of the machine's clock as it counts."""
        return self._plan, time_s - self._begun_s


class _Connection:
    """One connection, both directions."""

    def __init__(self, proxy: TcpProxy, number: int, near: asyncio.StreamWriter) -> None:
        self._proxy, self._number, self._near = proxy, number, near
        self._far: asyncio.StreamWriter | None = None
        self.lost = False
        """bytes of it vanished"""

    async def pass_on(self, reader: asyncio.StreamReader, host: str, port: int) -> None:
        """Until one side ends it or it is aborted."""
        try:
            far_reader, self._far = await asyncio.open_connection(host, port)
        except OSError:
            return
        tasks = []
        for way, source, sink in (("up", reader, self._far), ("down", far_reader, self._near)):
            queue: _Queue = asyncio.Queue(_PACKETS_ON_THE_WAY)
            tasks.append(asyncio.create_task(self._read(f"{self._number}/{way}", source, queue)))
            tasks.append(asyncio.create_task(self._write(queue, sink)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self) -> None:
        """Both sides get a reset."""
        for writer in (self._near, self._far):
            if writer is not None:
                writer.transport.abort()

    async def _read(self, key: str, source: asyncio.StreamReader, queue: _Queue) -> None:
        fates = self._proxy.plan_at(0)[0].fates(key)
        fate, offset, due_s, free_s = fates.next(), 0, 0.0, 0.0
        while data := await source.read(_PACKET_BYTES - offset):
            now_s = time.monotonic()
            plan, plan_s = self._proxy.plan_at(now_s)
            window = plan.at(plan_s)
            if window.link is LinkState.silent:
                self.lost = True
            else:
                place = fate.place * _PACKET_BYTES - offset
                if fate.corrupt < window.corrupt and 0 <= place < len(data):
                    data = turn_bit(data, place / len(data))
                took_s = len(data) / window.bytes_per_s
                free_s = self._proxy.free_at_s(key.rpartition("/")[2], free_s, now_s, took_s)
                late_s = window.delay_s + fate.jitter * window.jitter_s + _resent_s(fate, window.drop)
                passes_s = plan.passes_at_s(free_s + late_s - now_s + plan_s) - plan_s + now_s
                due_s = max(due_s, passes_s)
                await queue.put((due_s, data))
            offset = (offset + len(data)) % _PACKET_BYTES
            if offset == 0:
                fate = fates.next()
        await queue.put((due_s, b""))

    async def _write(self, queue: _Queue, sink: asyncio.StreamWriter) -> None:
        while True:
            due_s, data = await queue.get()
            while (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(min(wait_s, 3600.0))
            if not data:
                return
            sink.write(data)
            await sink.drain()


def _resent_s(fate: Fate, drop: float) -> float:
    """How late a packet is that was lost, perhaps again and again: the wait doubles each time."""
    late_s, losses, left = 0.0, 0, fate.drop
    while left < drop and losses < _MOST_LOSSES:
        late_s, losses, left = late_s + _RETRANSMIT_S * 2**losses, losses + 1, left / drop
    return late_s
