"""How relays move a version from memory to memory: each a process of its own, over real sockets on this machine.

Links with a rate (a token bucket each way) make schedules comparable on a machine whose cores are the limit otherwise.
A time is that from telling the relays of a version until the last of them has it whole, verified and visible.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.relay_processes import RelayProcess
from infra.store.names import default_root
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion, RelayChain, TensorSpec, WeightVersion

DEADLINE_S = 120.0
_SENDER = """
import socket, sys
size, piece = int(sys.argv[2]), int(sys.argv[3])
data = memoryview(bytearray(piece))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as out:
    out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while out.recv(1):
        for _ in range(0, size, piece):
            out.sendall(data)
"""


class Tier:
    """Relay processes over links of `rate` bytes a second each way (0: no limit); relay 0 has the trainer's memory.

    `broadcast` lets a new version of `size` bytes go from it to so many.
    """

    def __init__(self, relays: int, size: int, rate: float) -> None:
        self.size = size
        roots = [default_root(f"benchmark-relay-{os.getpid()}-{relay}") for relay in range(relays)]
        with ThreadPoolExecutor(relays) as at_once:
            self.relays = list(at_once.map(lambda relay: RelayProcess(roots[relay], relay, rate), range(relays)))
        self._store = WeightStore(roots[0], 1)
        self._data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self._number = self._chain = 0

    def broadcast(self, relays: int, chunk_bytes: int, schedule: str = "chain") -> tuple[str, float]:
        """Begin one from relay 0 to the next `relays` - 1; the version, and when (`time.monotonic`)."""
        self._stand(self.relays[:relays], schedule)
        manifest = self._publish(chunk_bytes)
        began = time.monotonic()
        for relay in self.relays[:relays]:
            relay.send(manifest)
        return str(manifest.version), began

    def seconds(self, relays: int, chunk_bytes: int, schedule: str = "chain") -> float:
        """What a broadcast takes."""
        version, began = self.broadcast(relays, chunk_bytes, schedule)
        wait_for(lambda: all(version in relay.had for relay in self.relays[1:relays]))
        return max(relay.had[version] for relay in self.relays[1:relays]) - began

    def close(self) -> None:
        self._store.close()
        for relay in self.relays:
            relay.close()
            shutil.rmtree(relay.root, ignore_errors=True)

    def _stand(self, relays: Sequence[RelayProcess], schedule: str) -> None:
        self._chain += 1
        chain = RelayChain(self._chain, tuple(relay.link for relay in relays), (), schedule, 0)
        for relay in relays:
            relay.send(chain)

    def _publish(self, chunk_bytes: int) -> WeightVersion:
        self._number += 1
        self._data[: 8 * 1024 : 1024] = self._number
        told: list[WeightVersion] = []
        specs = [TensorSpec("w", "U8", (self.size,))]
        publisher = Publisher(self._store, told.append, specs, chunk_bytes=chunk_bytes)
        publisher.publish(
            {"w": self._data},
            PolicyVersion(1, self._number),
            step=self._number,
            batches=(),
            batch_offsets=(),
            trajectories_trained=0,
        )
        publisher.close()
        return told[0]


@contextmanager
def tier(relays: int, size: int, rate: float) -> Iterator[Tier]:
    """A tier while the `with` block lasts."""
    made = Tier(relays, size, rate)
    try:
        yield made
    finally:
        made.close()


def wait_for(what: Callable[[], Any]) -> None:
    """Return once `what` is so. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("relays do not come on")
        time.sleep(0.005)


@dataclass(frozen=True)
class Throttled:
    """Seconds by number of relays, master included, in chains of many small chunks; then chain and binomial pipeline of
    all of them with a few large ones."""

    chain: dict[int, float]
    few_chain: float
    few_binomial: float

    @property
    def fitted(self) -> float:
        """What the cost model T(p) = a + b · (p − 2) says for 8, with a and b from 2 and 4."""
        return self.chain[2] + 3 * (self.chain[4] - self.chain[2])


def measure_throttled(megabytes: float, rate: float, repetitions: int) -> Throttled:
    """Broadcasts of so many 10^6 bytes over links of `rate` bytes a second; medians."""
    size = int(megabytes * 1_000_000)
    with tier(8, size, rate) as relays:
        times: dict[int, list[float]] = {2: [], 4: [], 8: []}
        few: dict[str, list[float]] = {"chain": [], "binomial": []}
        for _ in range(repetitions):
            for count, of_count in times.items():
                of_count.append(relays.seconds(count, size // 128))
            for schedule, of_schedule in few.items():
                of_schedule.append(relays.seconds(8, size // 4, schedule))
        return Throttled(
            {count: statistics.median(of_count) for count, of_count in times.items()},
            statistics.median(few["chain"]),
            statistics.median(few["binomial"]),
        )


@dataclass(frozen=True)
class Hop:
    """Bytes a second of each repetition: until a relay has every chunk, checked; until the version is hashed, sealed
    and visible; and of a bare pair of sockets with `recv_into`."""

    moved: list[float]
    visible: list[float]
    bare: list[float]

    @property
    def share(self) -> float:
        return statistics.median(ours / its for ours, its in zip(self.moved, self.bare, strict=True))


def measure_hop(megabytes: float, chunk_bytes: int, repetitions: int) -> Hop:
    """One hop between two relays without a limit, and the bare pair, in turn; both into memory that is there."""
    size = -(-int(megabytes * 1_000_000) // chunk_bytes) * chunk_bytes
    moved, visible, bare = [], [], []
    with tier(2, size, 0.0) as relays, _bare_pair(size, chunk_bytes) as pair:
        relays.seconds(2, chunk_bytes)  # no memory was reserved for the first
        successor = relays.relays[1]
        for _ in range(repetitions):
            wait_for(lambda: not successor.status["arrived"])  # memory for the next is ready
            bare.append(size / pair())
            version, began = relays.broadcast(2, chunk_bytes)
            wait_for(lambda version=version: version in successor.had)
            visible.append(size / (successor.had[version] - began))
            here = (status["at"] for status in successor.statuses if status["arrived"] >= size and status["at"] > began)
            moved.append(size / (next(here, successor.had[version]) - began))
    return Hop(moved, visible, bare)


@contextmanager
def _bare_pair(size: int, piece: int) -> Iterator[Callable[[], float]]:
    """Called, it says in how many seconds `size` bytes come from another process into memory here."""
    memory = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        sender = subprocess.Popen([sys.executable, "-c", _SENDER, str(port), str(size), str(piece)])
        connection, _ = door.accept()

    def once() -> float:
        started = time.perf_counter()
        connection.sendall(b"1")
        for start in range(0, size, piece):
            rest = memory[start : start + piece]
            while rest:
                rest = rest[connection.recv_into(rest) :]
        return time.perf_counter() - started

    try:
        yield once
    finally:
        connection.close()
        sender.wait(10)


@dataclass(frozen=True)
class Repair:
    """What a relay killed in the middle costs its successor: seconds to the next chunk, and chunks that were on their
    way from it, and asked for again: no more can come twice."""

    seconds: float
    chunks: int


def measure_repair(megabytes: float, rate: float) -> Repair:
    """Kill -9 the second of four relays in the middle of a broadcast."""
    size = int(megabytes * 1_000_000)
    chunk = size // 64
    with tier(4, size, rate) as relays:
        victim, successor = relays.relays[1:3]
        version, _ = relays.broadcast(4, chunk)
        wait_for(lambda: successor.status["arrived"] > size // 3)
        victim.kill()
        killed = time.monotonic()
        wait_for(lambda: version in successor.had)
        lost = next(i for i, status in enumerate(successor.statuses) if status["lost"])
        there = successor.statuses[lost - 1]["arrived"]
        after = next(status["at"] for status in successor.statuses[lost:] if status["arrived"] > there)
        assert successor.status["received"] <= size + successor.status["requested_again"] * chunk
        return Repair(after - killed, successor.status["requested_again"])
