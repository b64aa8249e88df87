"""Transfers of a version between relays, each a process, over real sockets on this machine.

Links with a rate limit (a token bucket per direction) make schedules comparable where the machine's cores would be the
limit. A broadcast lasts from sending the manifest to the relays until the last relay has the version, verified and
visible.
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
    """Relay processes over links of `rate` bytes/s per direction (0: no limit); relay 0 shares the trainer's memory.

    `broadcast` sends a new version of `size` bytes from relay 0 to other relays.
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
        """Start a broadcast from relay 0 to the next `relays` - 1. Returns the version and the start (monotonic)."""
        self._set_chain(self.relays[:relays], schedule)
        manifest = self._publish(chunk_bytes)
        began = time.monotonic()
        for relay in self.relays[:relays]:
            relay.send(manifest)
        return str(manifest.version), began

    def seconds(self, relays: int, chunk_bytes: int, schedule: str = "chain") -> float:
        """The seconds that a broadcast takes."""
        version, began = self.broadcast(relays, chunk_bytes, schedule)
        wait_for(lambda: all(version in relay.first_seen for relay in self.relays[1:relays]))
        return max(relay.first_seen[version] for relay in self.relays[1:relays]) - began

    def close(self) -> None:
        self._store.close()
        for relay in self.relays:
            relay.close()
            shutil.rmtree(relay.root, ignore_errors=True)

    def _set_chain(self, relays: Sequence[RelayProcess], schedule: str) -> None:
        self._chain += 1
        chain = RelayChain(self._chain, tuple(relay.link for relay in relays), (), schedule, 0)
        for relay in relays:
            relay.send(chain)

    def _publish(self, chunk_bytes: int) -> WeightVersion:
        self._number += 1
        self._data[: 8 * 1024 : 1024] = self._number
        manifests: list[WeightVersion] = []
        specs = [TensorSpec("w", "U8", (self.size,))]
        publisher = Publisher(self._store, manifests.append, specs, chunk_bytes=chunk_bytes)
        publisher.publish(
            {"w": self._data},
            PolicyVersion(1, self._number),
            step=self._number,
            batches=(),
            batch_offsets=(),
            trajectories_trained=0,
        )
        publisher.close()
        return manifests[0]


@contextmanager
def tier(relays: int, size: int, rate: float) -> Iterator[Tier]:
    """A tier while the `with` block lasts."""
    started = Tier(relays, size, rate)
    try:
        yield started
    finally:
        started.close()


def wait_for(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds. Raises TimeoutError after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the relays made no progress in {DEADLINE_S:g} s")
        time.sleep(0.005)


@dataclass(frozen=True)
class Throttled:
    """`chain`: seconds by number of relays, master included, in chains of many small chunks. `few_chain`,
    `few_binomial`: chain and binomial pipeline of all relays with a few large chunks."""

    chain: dict[int, float]
    few_chain: float
    few_binomial: float

    @property
    def fitted(self) -> float:
        """The cost model T(p) = a + b · (p − 2) at p = 8, with a and b from p = 2 and p = 4."""
        return self.chain[2] + 3 * (self.chain[4] - self.chain[2])


def measure_throttled(megabytes: float, rate: float, repetitions: int) -> Throttled:
    """Medians of broadcasts of `megabytes` · 10^6 bytes over links of `rate` bytes/s."""
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
    """Bytes/s of each repetition: `moved` until the relay has received and checked every chunk, `visible` until the
    version is hashed, sealed and visible, `bare` through a bare pair of sockets with `recv_into`."""

    moved: list[float]
    visible: list[float]
    bare: list[float]

    @property
    def share(self) -> float:
        return statistics.median(ours / its for ours, its in zip(self.moved, self.bare, strict=True))


def measure_hop(megabytes: float, chunk_bytes: int, repetitions: int) -> Hop:
    """Alternate one hop between two relays without a rate limit with the bare pair; both write to allocated memory."""
    size = -(-int(megabytes * 1_000_000) // chunk_bytes) * chunk_bytes
    moved, visible, bare = [], [], []
    with tier(2, size, 0.0) as relays, _bare_pair(size, chunk_bytes) as pair:
        relays.seconds(2, chunk_bytes)  # warm-up: no memory is reserved for the first version
        successor = relays.relays[1]
        for _ in range(repetitions):
            wait_for(lambda: not successor.status["arrived"])  # memory for the next version is ready
            bare.append(size / pair())
            version, began = relays.broadcast(2, chunk_bytes)
            wait_for(lambda version=version: version in successor.first_seen)
            visible.append(size / (successor.first_seen[version] - began))
            here = (status["at"] for status in successor.statuses if status["arrived"] >= size and status["at"] > began)
            moved.append(size / (next(here, successor.first_seen[version]) - began))
    return Hop(moved, visible, bare)


@contextmanager
def _bare_pair(size: int, piece: int) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds to receive `size` bytes from another process into memory."""
    memory = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = subprocess.Popen([sys.executable, "-c", _SENDER, str(port), str(size), str(piece)])
        connection, _ = listener.accept()

    def receive_all() -> float:
        started = time.perf_counter()
        connection.sendall(b"1")
        for start in range(0, size, piece):
            rest = memory[start : start + piece]
            while rest:
                rest = rest[connection.recv_into(rest) :]
        return time.perf_counter() - started

    try:
        yield receive_all
    finally:
        connection.close()
        sender.wait(10)


@dataclass(frozen=True)
class Repair:
    """The cost of a killed relay for its successor: seconds until the next chunk, and the chunks in flight, which are
    requested again; no other chunk can arrive twice."""

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
        wait_for(lambda: version in successor.first_seen)
        lost = next(i for i, status in enumerate(successor.statuses) if status["lost"])
        there = successor.statuses[lost - 1]["arrived"]
        after = next(status["at"] for status in successor.statuses[lost:] if status["arrived"] > there)
        assert successor.status["received"] <= size + successor.status["requested_again"] * chunk
        return Repair(after - killed, successor.status["requested_again"])
