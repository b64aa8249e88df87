"""Replicas with a part of a weight version each, in one process: each has its own store, engine and server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from tiny_engines import TransformersEngine, assert_same
from tiny_models import GQA, VOCABULARY
from transformers import Qwen2Config, Qwen2ForCausalLM

from infra.models.weights import save_weights
from infra.store import names
from infra.store.chunks import chunk_checksums
from infra.store.incoming_version import Seal, write_seal
from infra.store.model_parts import model_parts
from infra.store.weight_files import tensor_places
from infra.store.weight_store import WeightStore
from infra.transport.connection import interrupt
from infra.transport.endpoint import Endpoint
from infra.transport.kv_transfer import KVTransfers
from infra.transport.tls import Tls
from operators.rollout.engine import Completion, Request
from operators.rollout.staged.member import StageMember
from operators.rollout.staged.replica_staging import ReplicaStaging
from operators.rollout.staged.service import StageService
from schemas.records import PolicyVersion, Stage, StageGroup, TensorSpec, WeightVersion

LAYERS = 5
CHUNK = 512


def model(seed: int = 0) -> Qwen2ForCausalLM:
    """A model of five layers, so that stages differ in size."""
    torch.manual_seed(seed)
    config = Qwen2Config(**{**GQA, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).eval()


class Version:
    """A weight version: its bytes and its manifest."""

    def __init__(self, folder: Path, number: int = 1, seed: int = 7) -> None:
        file = folder / f"whole-{number}"
        save_weights(model(seed), file)
        self.bytes = file.read_bytes()
        self.version = PolicyVersion(1, number)
        places = tensor_places(memoryview(self.bytes))
        specs = tuple(TensorSpec(name, place.spec.dtype, place.spec.shape) for name, place in places.items())
        checks = chunk_checksums(memoryview(self.bytes), CHUNK)
        self.manifest = WeightVersion(
            version=self.version,
            parent=None,
            step=number,
            file=names.weight_file(self.version),
            bytes=len(self.bytes),
            blake3="",
            tensors=specs,
            batches=(),
            batch_offsets=(),
            trajectories_trained=0,
            final=False,
            created_at=0,
            chunk_bytes=CHUNK,
            chunk_checksums=checks,
        )
        self.parts = model_parts(self.manifest)

    def arrived(self, layers: Collection[int], *, ends: bool) -> bytes:
        """The bytes with only these parts; the other chunks are zeros."""
        chunks = set(self.parts.ends) if ends else set()
        chunks = chunks.union(*(self.parts.layers[layer] for layer in layers))
        found = bytearray(len(self.bytes))
        for chunk in chunks:
            found[chunk * CHUNK : (chunk + 1) * CHUNK] = self.bytes[chunk * CHUNK : (chunk + 1) * CHUNK]
        return bytes(found)


class Replica:
    """A replica without weights; `arrive` puts a part of a version into its store, `whole` all of it."""

    def __init__(self, index: int, root: Path, slots: int = 16, tls: Tls | None = None) -> None:
        self.store = WeightStore(root / f"store-{index}")
        self.transfers = KVTransfers("run", Endpoint(token="a-token-of-the-tests", tls=tls), 1 << 26)
        self.engine = TransformersEngine(model(seed=100 + index), slots=slots)
        self.index = index
        member = StageMember(index, 1, self.engine, self.store.root)
        self.staging = ReplicaStaging(member, self.store, StageService(self.transfers))

    def arrive(self, version: Version, layers: Collection[int], *, ends: bool = False, announced: bool = True) -> None:
        if announced:
            self.staging.announce(version.manifest)
        (self.store.root / f"{version.version}{names.PARTIAL}").write_bytes(version.arrived(layers, ends=ends))

    def whole(self, version: Version) -> None:
        write_seal(self.store.root, Seal(version.version, len(version.bytes), ""))
        (self.store.root / f"{version.version}{names.PARTIAL}").unlink(missing_ok=True)
        (self.store.root / names.weight_file(version.version)).write_bytes(version.bytes)

    def abandon(self, version: Version) -> None:
        """Discard what has arrived, as a relay does for a newer version."""
        (self.store.root / f"{version.version}{names.PARTIAL}").unlink()

    def stage(self, first: int, end: int) -> Stage:
        return Stage(self.index, 1, self.transfers.address, first, end)

    def die(self) -> None:
        """Close all connections, as the end of the process does."""
        self.transfers.close()

    def close(self) -> None:
        self.staging.close()
        self.transfers.close()
        self.store.close()


class Network:
    """Passes the bytes of connections to `address` on until it is `partitioned`; connections stay open."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to, self.partitioned = (host, int(port)), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listening]
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._listening.accept()[0], socket.create_connection(self._to)
                self._open += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(1 << 16)) and not self.partitioned.is_set():
                target.sendall(data)
            if not data:
                target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._open:
            interrupt(each)
            each.close()


Replicas = Callable[..., list[Replica]]
"""Makes so many replicas, numbered from 0, with these arguments."""


def group(version: Version, stages: Sequence[Stage], name: str = "g-1") -> StageGroup:
    return StageGroup(name, version.version, tuple(stages), stages[0].replica, 1)


def lead(leader: Replica, order: StageGroup) -> None:
    """Form `order` and wait until it is formed or has failed."""
    leader.staging.order(order)
    leader.staging.advance()
    if (formed := leader.staging._forming) is not None:  # it fails at once if the leader refuses
        assert leader.staging.status(0).forming == order.group
        formed.exception(timeout=30)
    leader.staging.advance()


def finish(
    leader: Replica, steps: int | None = None, before_step: Callable[[int], None] = lambda step: None
) -> dict[str, Completion]:
    """Step the leader's engine `steps` times, or until nothing is left that it can compute."""
    done: dict[str, Completion] = {}
    step = 0
    while leader.engine.due() == 0 and (steps is None or step < steps):
        before_step(step)
        done |= {each.trajectory_id: each for each in leader.engine.step()}
        leader.staging.advance()
        step += 1
    return done


def three_stages(replicas: Replicas, version: Version) -> list[Replica]:
    """Replicas 0, 1, 2 lead and run layers 0-1, 2-3 and 4; replica 3 has layers 2-4 and no part."""
    made = replicas(4)
    made[0].arrive(version, (0, 1), ends=True)
    made[1].arrive(version, (2, 3))
    made[2].arrive(version, (4,))
    made[3].arrive(version, (2, 3, 4))
    lead(made[0], group(version, [made[0].stage(0, 2), made[1].stage(2, 4), made[2].stage(4, 5)]))
    assert made[0].staging.status(0).leads, made[0].staging.status(0).error
    return made


def submit(leader: Replica, requests: list[Request]) -> None:
    for request in requests:
        leader.engine.submit(request)


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_all_same(done: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert done.keys() == expected.keys()
    for name, completion in done.items():
        assert_same(completion, expected[name])
