"""Relays for tests on one machine: each has its own store and port, and they transfer over real sockets."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from infra.store.chunks import chunk_checksums
from infra.store.deltas import encode_delta
from infra.store.layout import Layout
from infra.store.names import SHARED_MEMORY, default_root
from infra.store.object_tier import ObjectTier
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.relay_node import RelayNode
from infra.transport.throttle import Link
from schemas.records import PolicyVersion, RelayChain, RelayLink, TensorSpec, WeightDelta, WeightVersion

RUN = "r"
TOKEN = "a-token-of-the-tests"
CHUNK = 64 << 10
TIMEOUT_S = 60.0
_numbers = itertools.count(1)
_chain_numbers = itertools.count(1)


def until(condition: Callable[[], Any], message: str = "") -> Any:
    """Poll `condition` until it returns a true value, and return that."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (result := condition()):
        assert time.monotonic() < deadline, message or "the condition did not become true"
        time.sleep(0.005)
    return result


def new_root() -> Path:
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path("/tmp")
    return default_root(f"test-{os.getpid()}-relay-{next(_numbers)}", base)


def weights(seed: int, megabytes: float = 1.0) -> np.ndarray:
    """A weight file with one tensor of random bfloat16 bits."""
    elements = int(megabytes * (1 << 20)) // 2
    layout = Layout(specs(elements))
    body = np.random.default_rng(seed).integers(0, 1 << 16, elements, np.uint16)
    return np.concatenate([np.frombuffer(layout.header, np.uint8), body.view(np.uint8)])


def specs(elements: int) -> list[TensorSpec]:
    return [TensorSpec("w", "BF16", (elements,))]


def elements_of(data: np.ndarray) -> int:
    header = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return (len(data) - header) // 2


def manifest_of(version: str, data: np.ndarray, **changes: Any) -> WeightVersion:
    fields: dict[str, Any] = {
        "version": PolicyVersion.parse(version),
        "parent": None,
        "step": 1,
        "file": f"{version}.safetensors",
        "bytes": len(data),
        "blake3": blake3(data).hexdigest(),
        "tensors": tuple(specs(elements_of(data))),
        "batches": (),
        "batch_offsets": (),
        "trajectories_trained": 0,
        "final": False,
        "created_at": 0,
        "chunk_bytes": CHUNK,
        "chunk_checksums": chunk_checksums(memoryview(data), CHUNK),
    }
    return WeightVersion(**{**fields, **changes})


def delta_of(parent: WeightVersion, old: np.ndarray, new: np.ndarray) -> tuple[bytes, WeightDelta]:
    """The delta from `old`, which is version `parent`, to `new`, and its entry in the manifest of `new`."""
    delta = encode_delta(memoryview(old), memoryview(new), Layout(parent.tensors).spans())
    return delta, WeightDelta(parent.version, parent.blake3, len(delta), chunk_checksums(memoryview(delta), CHUNK))


def store_version(store: WeightStore, manifest: WeightVersion, data: np.ndarray) -> None:
    """Write a version to `store`, as a trainer does."""
    arriving = store.begin(manifest.version, len(data))
    arriving.view[:] = memoryview(data)
    arriving.seal()
    store.release_writer()


class Machine:
    """A weight store and its relay."""

    def __init__(
        self,
        relay: int,
        run: str = RUN,
        rate: float | None = None,
        keep: int = 4,
        copies: WeightStore | None = None,
        objects: ObjectTier | None = None,
        **endpoint: Any,
    ) -> None:
        self.relay = relay
        self.store = WeightStore(new_root(), keep)
        reached = Endpoint(**{"token": TOKEN, **endpoint})
        self.node = RelayNode(self.store, run, relay, reached, Link(rate), Link(rate), copies=copies, objects=objects)

    @property
    def link(self) -> RelayLink:
        return RelayLink(self.relay, self.node.address, "here", str(self.store.root))

    def has(self, version: str) -> bool:
        return PolicyVersion.parse(version) in self.store.versions()

    def bytes_of(self, version: str) -> bytes:
        return self.store.path(PolicyVersion.parse(version)).read_bytes()

    def close(self) -> None:
        self.node.close()
        self.store.close()
        shutil.rmtree(self.store.root, ignore_errors=True)


@contextmanager
def machines(count: int, first: int = 0, **how: Any) -> Iterator[list[Machine]]:
    """`count` machines, numbered from `first`."""
    started = [Machine(relay, **how) for relay in range(first, first + count)]
    try:
        yield started
    finally:
        closers = [threading.Thread(target=machine.close) for machine in started]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()


@contextmanager
def held(link: Link, after: int = 0) -> Iterator[None]:
    """Only about `after` bytes pass `link` until the block ends, however long the test takes."""
    released, acquire, most = threading.Event(), link.acquire, link.bytes_passed + after

    def wait_and_acquire(count: int, turn: int = 0) -> None:
        if link.bytes_passed >= most:
            released.wait(TIMEOUT_S)
        acquire(count, turn)

    link.acquire = wait_and_acquire  # type: ignore[method-assign]
    try:
        yield
    finally:
        released.set()


def chain_over(links: Sequence[RelayLink], joining: Sequence[int] = (), schedule: str = "chain") -> RelayChain:
    return RelayChain(next(_chain_numbers), tuple(links), tuple(joining), schedule, 0)


def configure(
    relays: Sequence[Machine], *manifests: WeightVersion, joining: Sequence[int] = (), schedule: str = "chain"
) -> None:
    """Give all `relays` a chain in this order and these manifests."""
    chain = chain_over([each.link for each in relays], joining, schedule)
    for each in relays:
        each.node.set_chain(chain)
        each.node.set_manifests(manifests)
