"""A network between simulated hosts: streams of bytes as of TCP, with bandwidth, latency and faults.

Bytes arrive in order and once, as TCP delivers them. A host's link sends one message after the other at its rate; a
sender waits until its bytes have left. Faults of a host make its link slow, lose segments (which arrive late, or the
connection breaks: nothing that is sent later arrives), damage long messages, or cut it off.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

from infra.closing import ClosedAtExit
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler, Signal
from infra.simulation.streams import Streams

LinkFaultKind = Literal["slow", "lossy", "damaged", "cut"]
LINK_FAULTS: tuple[LinkFaultKind, ...] = get_args(LinkFaultKind)
BYTES_PER_S = 100_000.0
SLOW_FACTOR = 20.0
"""How many times slower a slow link is, and its latency longer."""
BREAKS_AFTER_S = 15.0
"""A connection that delivers nothing for so long breaks."""
DAMAGED_FROM = 256
"""Bytes from which a message may be damaged: shorter ones have no checksum but TCP's, which this network trusts."""


@dataclass(frozen=True)
class LinkFault:
    """The link of `host` has a fault from `begin` to `end`."""

    host: str
    begin: float
    end: float
    kind: LinkFaultKind


class _Link:
    """The link of a host: when each direction is free."""

    def __init__(self) -> None:
        self.sends_at = self.receives_at = 0.0


class DataNetwork:
    """The hosts, their listening sockets and their faults."""

    def __init__(self, scheduler: EventScheduler, streams: Streams) -> None:
        self.scheduler, self.streams = scheduler, streams
        self.faults: list[LinkFault] = []
        self.bytes = 0
        """Bytes sent so far."""
        self._links: dict[str, _Link] = {}
        self._listeners: dict[str, SimulatedListener] = {}
        self._sockets: dict[SimulatedProcess, list[SimulatedSocket]] = {}
        self._ports: dict[str, int] = {}

    def listen(self, process: SimulatedProcess, host: str) -> SimulatedListener:
        """A listener at a new port of `host`."""
        port = self._ports[host] = self._ports.get(host, 7000) + 1
        found = self._listeners[f"{host}:{port}"] = SimulatedListener(self, process, host, port)
        return found

    def connect(self, process: SimulatedProcess, host: str, address: str, timeout_s: float) -> SimulatedSocket:
        """Open a connection from `host`. Raises ConnectionRefusedError, TimeoutError."""
        to = address.rpartition(":")[0]
        self.scheduler.sleep(2 * self.latency(host, to))
        if self.cut_until(host, to) > self.scheduler.now:
            self.scheduler.sleep(timeout_s)
            raise TimeoutError("timed out")
        listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        near = SimulatedSocket(self, process, host, to)
        far = near.peer = SimulatedSocket(self, listener.process, to, host)
        far.peer = near
        for each in (near, far):
            self._sockets.setdefault(each.process, []).append(each)
        listener.add(far, host)
        return near

    def end_process(self, process: SimulatedProcess) -> None:
        """Close all that a process has open, as its kernel does."""
        for address in [address for address, each in self._listeners.items() if each.process is process]:
            self._listeners[address].close()
        for each in self._sockets.pop(process, []):
            each.close()

    def forget(self, listener: SimulatedListener) -> None:
        """Remove a listener."""
        self._listeners.pop(f"{listener.host}:{listener.port}", None)

    def latency(self, host: str, to: str) -> float:
        """Seconds for one way."""
        slow = self._has(host, "slow") or self._has(to, "slow")
        return (0.001 + 0.002 * self.streams.of(host, "latency").random()) * (SLOW_FACTOR if slow else 1.0)

    def cut_until(self, host: str, to: str) -> float:
        """When the present cut between two hosts ends; 0 if there is none."""
        if host == to:
            return 0.0
        now = self.scheduler.now
        ends = [f.end for f in self.faults if f.kind == "cut" and f.host in (host, to) and f.begin <= now < f.end]
        return max(ends, default=0.0)

    def send(self, sender: SimulatedSocket, data: bytes) -> None:
        """Deliver `data` to the peer of `sender`; returns once it has left."""
        scheduler, host, to = self.scheduler, sender.host, sender.remote
        self.bytes += len(data)
        there, back = self._link(host), self._link(to)
        slow = SLOW_FACTOR if self._has(host, "slow") or self._has(to, "slow") else 1.0
        left = max(scheduler.now, there.sends_at, back.receives_at) + len(data) * slow / BYTES_PER_S
        there.sends_at = back.receives_at = left
        arrives, broken = left + self.latency(host, to), False
        draws = self.streams.of(host, "faults of messages")
        if self._has(host, "lossy") or self._has(to, "lossy"):
            drawn = draws.random()
            broken = drawn < 0.05
            arrives += 3.0 * draws.random() ** 2 if drawn < 0.3 else 0.0
        damaged = len(data) >= DAMAGED_FROM and (self._has(host, "damaged") or self._has(to, "damaged"))
        if damaged and draws.random() < 0.3:
            at = draws.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << draws.randrange(8))]) + data[at + 1 :]
        if (heals := self.cut_until(host, to)) > scheduler.now:
            broken |= heals - scheduler.now > BREAKS_AFTER_S
            arrives = max(arrives, heals) + 1.0 * draws.random()
        if broken:
            sender.lost = True
            scheduler.after(BREAKS_AFTER_S * draws.random(), sender.reset)
        else:
            sender.deliver(arrives, data)
        scheduler.sleep(left - scheduler.now)

    def _has(self, host: str, kind: LinkFaultKind) -> bool:
        now = self.scheduler.now
        return any(f.host == host and f.kind == kind and f.begin <= now < f.end for f in self.faults)

    def _link(self, host: str) -> _Link:
        return self._links.setdefault(host, _Link())


class SimulatedListener:
    """A listening socket; connections wait in it until they are accepted, also while the process is paused."""

    def __init__(self, network: DataNetwork, process: SimulatedProcess, host: str, port: int) -> None:
        self.process, self.host, self.port = process, host, port
        self._network, self._waiting, self._changed = network, deque[tuple[SimulatedSocket, str]](), Signal()
        self._closed = False

    def add(self, connection: SimulatedSocket, address: str) -> None:
        """A new connection."""
        self._waiting.append((connection, address))
        self._network.scheduler.notify(self._changed)

    def accept(self) -> tuple[SimulatedSocket, str]:
        """The next connection. Raises OSError once it is closed."""
        while not self._waiting and not self._closed:
            self._network.scheduler.wait([self._changed])
        if self._closed:
            raise OSError("the socket is closed")
        return self._waiting.popleft()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._network.forget(self)
        while self._waiting:
            self._waiting.popleft()[0].close()
        self._network.scheduler.notify(self._changed)


class SimulatedSocket(ClosedAtExit):
    """One end of a connection, with the methods of `infra.transport.connection.Connection`."""

    peer: SimulatedSocket

    def __init__(self, network: DataNetwork, process: SimulatedProcess, host: str, remote: str) -> None:
        self.process, self.host, self.remote = process, host, remote
        self._network, self._changed = network, Signal()
        self._data = bytearray()
        self._timeout_s: float | None = None
        self._ended = self._closed = self._broken = False
        self._last_arrival = 0.0
        self.lost = False
        """A segment of this end is lost for ever: what follows it cannot arrive, neither bytes nor the end."""

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send all of `data`. Raises OSError."""
        self._check()
        self._network.send(self, bytes(data))

    def recv_into(self, memory: memoryview, /) -> int:
        """Receive some bytes; 0 at the end of the stream. Raises OSError, TimeoutError."""
        scheduler = self._network.scheduler
        deadline = float("inf") if self._timeout_s is None else scheduler.now + self._timeout_s
        while not self._data:
            if self._broken or self._closed:
                self._check()
            if self._ended:
                return 0
            if scheduler.now >= deadline:
                raise TimeoutError("timed out")
            scheduler.wait([self._changed], deadline - scheduler.now)
        count = min(len(memory), len(self._data))
        memory[:count] = self._data[:count]
        del self._data[:count]
        return count

    def settimeout(self, seconds: float | None, /) -> None:
        """The longest time to wait for bytes."""
        self._timeout_s = seconds

    def shutdown(self, how: int, /) -> None:
        """End both directions."""
        self._end()
        self._ended = True
        self._network.scheduler.notify(self._changed)

    def close(self) -> None:
        """Close this end; the other reads what is on its way, and then the end."""
        self._end()
        self._closed = True
        self._network.scheduler.notify(self._changed)

    def deliver(self, at: float, data: bytes | None) -> None:
        """Let `data` (None: the end of the stream) arrive at the other end after all before it, unless some is lost."""
        if self.lost:
            return
        self._last_arrival = max(at, self._last_arrival)
        self._network.scheduler.at(self._last_arrival, lambda: self.peer.arrive(data))

    def arrive(self, data: bytes | None) -> None:
        """Receive bytes, or the end of the stream."""
        if self._closed:
            if data:
                self.peer.reset()
            return
        if data is None:
            self._ended = True
        else:
            self._data += data
        self._network.scheduler.notify(self._changed)

    def reset(self) -> None:
        """Break the connection, at both ends."""
        for each in (self, self.peer):
            each._broken = True
            each._network.scheduler.notify(each._changed)

    def _end(self) -> None:
        if not (self._ended or self._closed):
            network = self._network
            leaves = max(network.scheduler.now, network.cut_until(self.host, self.remote))
            self.deliver(leaves + network.latency(self.host, self.remote), None)

    def _check(self) -> None:
        if self._broken:
            raise ConnectionResetError("the connection was reset")
        if self._closed or self._ended:
            raise BrokenPipeError("the connection is closed")
