"""A relay as a fold, and the store of its machine, as fixtures and as functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from infra.files import create_secret
from infra.store.weight_store import WeightStore
from infra.transport.relay_node import RelayNode
from operators.io.elements import Output, PartitionKey, Polled, ReceivedRecord
from operators.relay.config import RelayConfig
from operators.relay.relay import RelayFold
from operators.relay.tiers import open_tiers
from schemas.records import DeadLetter, PolicyVersion, WeightVersion

DATA = b"weights"
PARTITION = PartitionKey("relay", 0)
KAFKA = "127.0.0.1:9092"


class Relay:
    """A relay under test; `next_offset` is the next offset of the relay topic."""

    def __init__(self, root: Path, state: dict[str, Any] | None = None, next_offset: int = 0, **changes: Any) -> None:
        self.next_offset = next_offset
        config = RelayConfig(str(root), relay=3, token_file=str(root.parent / "token"), **changes)
        create_secret(Path(config.token_file))
        store = WeightStore(root, config.keep_versions)
        node = RelayNode(store, "run", config.relay, config.endpoint(KAFKA), config.link(), config.link())
        tiers = open_tiers(config, "run", store)
        self.fold = RelayFold(config, store, node, state or {}, wall_s=lambda: 1.5, tiers=tiers)

    def receive(self, *records: Any, caught_up: bool = True) -> Sequence[Output]:
        received = tuple(ReceivedRecord("relay", 0, self.next_offset + n, record) for n, record in enumerate(records))
        self.next_offset += len(records)
        return self.fold.fold(Polled("group", 1, received, (), {PARTITION: self.next_offset}, caught_up))

    def held(self, *records: Any) -> tuple[str, ...]:
        """The versions of its heartbeat after it has consumed `records`."""
        self.receive(*records)
        status = self.fold.status()
        assert status is not None
        return status.versions

    def checkpoint(self) -> tuple[int, Any]:
        checkpoint = self.fold.checkpoint({PARTITION: self.next_offset})
        assert checkpoint.ledger_from is None
        return checkpoint.low_water[PARTITION], checkpoint.state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    """The machine's store; the tests write to it as a trainer does."""
    with WeightStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def relay(store: WeightStore) -> Iterator[Relay]:
    opened = Relay(store.root, keep_versions=2)
    yield opened
    opened.fold.close()


def manifest(version: str, data: bytes = DATA, **changes: Any) -> WeightVersion:
    plain = WeightVersion(
        version=PolicyVersion.parse(version),
        parent=None,
        step=1,
        file=f"{version}.safetensors",
        bytes=len(data),
        blake3=blake3(data).hexdigest(),
        tensors=(),
        batches=(1,),
        batch_offsets=(1,),
        trajectories_trained=1,
        final=False,
        created_at=1,
    )
    return replace(plain, **changes)


def add(store: WeightStore, version: str, data: bytes = DATA) -> WeightVersion:
    """Write a version to the store and return its manifest."""
    incoming = store.begin(PolicyVersion.parse(version), len(data))
    incoming.view[:] = data
    incoming.seal()
    return manifest(version, data)


def letters(outputs: Sequence[Output]) -> list[DeadLetter]:
    return [output.record for output in outputs if isinstance(output.record, DeadLetter)]
