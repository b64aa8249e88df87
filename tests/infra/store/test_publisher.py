"""The publisher: published and skipped versions, their manifests, and failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from crc32c import crc32c
from safetensors.numpy import load_file, save

from infra.store import incoming_version
from infra.store.chunks import DEFAULT_CHUNK_BYTES
from infra.store.deltas import apply_delta
from infra.store.errors import CorruptVersion, NoRoom, StoreError
from infra.store.ownership import remove_store
from infra.store.publisher import Publisher, PublishFailed
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion, TensorSpec, WeightDelta, WeightVersion

SPECS = [TensorSpec("small", "F16", (3,)), TensorSpec("large", "F32", (64, 64))]
TIMEOUT_S = 10.0


class Log:
    """Collects manifests; blocks while `gate` is closed, and raises `failures` first."""

    def __init__(self) -> None:
        self.manifests: list[WeightVersion] = []
        self.failures: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, manifest: WeightVersion) -> None:
        assert self.gate.wait(TIMEOUT_S)
        if self.failures:
            raise self.failures.pop()
        self.manifests.append(manifest)


def tensors(value: float = 0.0) -> dict[str, np.ndarray]:
    return {"small": np.full(3, value, np.float16), "large": np.full((64, 64), value, np.float32)}


@pytest.fixture
def store(root: Path) -> Iterator[WeightStore]:
    with WeightStore(root, keep=2) as opened:
        yield opened


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def publish(store: WeightStore, log: Log) -> Iterator[Callable[..., bool]]:
    """`publish(number, value)`; `publish.publisher` is the publisher."""
    publisher = Publisher(store, log, SPECS, PolicyVersion(1, 0), wall_ms=lambda: 1234)

    def call(number: int, value: float = 0.0, **how: Any) -> bool:
        how = {"batches": (number,), **how}
        return publisher.publish(
            tensors(value),
            PolicyVersion(1, number),
            step=number,
            batch_offsets=(10 * number,),
            trajectories_trained=8 * number,
            **how,
        )

    call.publisher = publisher  # type: ignore[attr-defined]
    yield call
    log.gate.set()
    log.failures.clear()
    publisher.close(TIMEOUT_S)


def flush(publish: Any, timeout_s: float = TIMEOUT_S) -> None:
    publish.publisher.flush(timeout_s)


def test_published_file_equals_that_of_the_library(publish: Any, store: WeightStore, log: Log) -> None:
    assert publish(1, 1.5)
    flush(publish)
    file = save(tensors(1.5), metadata={"format": "pt"})
    assert store.path(PolicyVersion(1, 1)).read_bytes() == file
    assert log.manifests == [
        WeightVersion(
            version=PolicyVersion(1, 1),
            parent=PolicyVersion(1, 0),
            step=1,
            file="1.1.safetensors",
            bytes=len(file),
            blake3=blake3(file).hexdigest(),
            tensors=(SPECS[1], SPECS[0]),
            batches=(1,),
            batch_offsets=(10,),
            trajectories_trained=8,
            final=False,
            created_at=1234,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            chunk_checksums=(crc32c(file),),
        )
    ]


def test_tensors_may_change_after_publish_returns(store: WeightStore, log: Log) -> None:
    publisher = Publisher(store, log, SPECS)
    log.gate.clear()
    weights = tensors(1.0)
    publisher.publish(weights, PolicyVersion(1, 1), step=1, batches=(), batch_offsets=(), trajectories_trained=0)
    weights["large"][:] = 2.0
    log.gate.set()
    publisher.close(TIMEOUT_S)
    assert (load_file(store.path(PolicyVersion(1, 1)))["large"] == 1.0).all()


def test_version_is_stored_before_its_manifest_is_published(store: WeightStore) -> None:
    seen = []
    publisher = Publisher(store, lambda manifest: seen.append(store.seal(manifest.version).blake3), SPECS)
    publisher.publish(tensors(), PolicyVersion(1, 1), step=1, batches=(), batch_offsets=(), trajectories_trained=0)
    publisher.close(TIMEOUT_S)
    assert seen == [store.seal(PolicyVersion(1, 1)).blake3]


def test_skipped_batches_are_in_the_next_manifest(publish: Any, log: Log, store: WeightStore) -> None:
    log.gate.clear()
    assert publish(1)
    assert not publish(2)
    assert not publish(3, batches=(3, 4))
    log.gate.set()
    assert publish(5, wait_for_previous=True)
    flush(publish)
    assert [(m.version.number, m.parent, m.batches) for m in log.manifests] == [
        (1, PolicyVersion(1, 0), (1,)),
        (5, PolicyVersion(1, 1), (2, 3, 4, 5)),
    ]


@pytest.mark.parametrize("how", [{"wait_for_previous": True}, {"final": True}])
def test_publish_can_wait_for_the_previous_version(publish: Any, log: Log, how: dict[str, bool]) -> None:
    log.gate.clear()
    publish(1)
    opener = threading.Timer(0.2, log.gate.set)
    opener.start()
    assert publish(2, **how)
    assert [each.version.number for each in log.manifests][:1] == [1]  # it waited; the second may be published, too
    opener.join()
    flush(publish)
    assert [(m.version.number, m.final) for m in log.manifests] == [(1, False), (2, how.get("final", False))]


def test_publisher_evicts_old_versions(publish: Any, store: WeightStore) -> None:
    for number in range(1, 8):
        assert publish(number, wait_for_previous=True)
        flush(publish)
        assert len(store.versions()) <= 2
    assert store.newest() == PolicyVersion(1, 7)


def test_publish_raises_no_room_before_copying(store: WeightStore, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    how: dict[str, Any] = {"step": 1, "batch_offsets": (), "trajectories_trained": 0}
    with monkeypatch.context() as full:
        full.setattr(incoming_version, "free_bytes", lambda folder: 100)
        publisher = Publisher(store, log, SPECS, copy=lambda place, tensor: copied.append("copied"))
        with pytest.raises(NoRoom, match="has 100 bytes free"):
            publisher.publish(tensors(), PolicyVersion(1, 1), batches=(1,), **how)
    assert (copied, store.versions()) == ([], [])
    assert publisher.publish(tensors(), PolicyVersion(1, 2), batches=(2,), **how)
    publisher.close(TIMEOUT_S)
    assert [(m.version.number, m.parent, m.batches) for m in log.manifests] == [(2, None, (1, 2))]


def test_publish_evicts_versions_that_readers_released(
    publish: Any, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.pin(_published(publish, 1)), store.pin(_published(publish, 2)):
        _published(publish, 3)
        _published(publish, 4)
        assert len(store.versions()) == 4
    store.reserve(1)  # no memory is reserved for the next version
    monkeypatch.setattr(incoming_version, "free_bytes", lambda folder: 0 if len(store.versions()) > 2 else 1 << 30)
    assert publish(5)


def test_publisher_adds_deltas_that_are_small_and_wanted(
    store: WeightStore, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.store.publisher.FULL_EVERY", 4)
    weights, wanted = tensors(), [True]
    publishing = Publisher(store, log, SPECS, deltas=lambda: wanted[0])

    def out(number: int) -> WeightDelta | None:
        how: dict[str, Any] = {"step": number, "batches": (), "batch_offsets": (), "trajectories_trained": 0}
        publishing.publish(weights, PolicyVersion(1, number), **how)
        publishing.flush(TIMEOUT_S)
        return log.manifests[-1].delta

    deltas = []
    for number in range(1, 7):
        weights["large"][number, 0] += 1
        deltas.append(out(number))
    assert [delta is not None for delta in deltas] == [False, True, True, True, False, True]
    parent, child = log.manifests[-2:]
    assert child.delta is not None
    assert (child.delta.parent, child.delta.parent_blake3) == (parent.version, parent.blake3)
    rebuilt = bytearray(child.bytes)
    delta = store.open_delta(child.version)
    assert delta is not None
    with store.read(parent.version) as before:
        apply_delta(delta, before, memoryview(rebuilt))
    assert blake3(rebuilt).hexdigest() == child.blake3

    weights["large"] = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    assert out(7) is None  # as large as the version
    weights["large"][0, 0] += 1
    wanted[0] = False
    assert out(8) is None
    publishing.close(TIMEOUT_S)


def test_failed_manifest_is_raised_once(publish: Any, log: Log) -> None:
    log.failures.append(OSError("the broker is down"))
    assert publish(1)
    with pytest.raises(PublishFailed, match=r"version 1\.1 was not published: the broker is down") as failed:
        publish(2, wait_for_previous=True)
    assert isinstance(failed.value.__cause__, OSError)
    assert publish.publisher.published == PolicyVersion(1, 0)
    assert publish(3)
    flush(publish)
    assert publish.publisher.published == PolicyVersion(1, 3)
    assert [(m.version.number, m.parent, m.batches) for m in log.manifests] == [(3, PolicyVersion(1, 0), (1, 2, 3))]


def test_failed_manifest_can_be_published_again(publish: Any, log: Log) -> None:
    log.failures.append(TimeoutError("no answer"))
    assert publish(1, final=True)
    with pytest.raises(PublishFailed, match="no answer"):
        flush(publish)
    flush(publish)
    assert publish(1, final=True)
    flush(publish)
    assert [(m.version.number, m.final, m.batches) for m in log.manifests] == [(1, True, (1,))]


def test_restore_version_writes_a_lost_version(publish: Any, log: Log, store: WeightStore) -> None:
    publish(1, 1.5)
    flush(publish)
    path = store.path(PolicyVersion(1, 1))
    before = path.read_bytes()
    assert not publish.publisher.restore_version(tensors(2.5), *log.manifests)  # it is stored
    path.unlink()
    with pytest.raises(CorruptVersion):
        publish.publisher.restore_version(tensors(2.5), *log.manifests)
    assert store.versions() == []
    assert publish.publisher.restore_version(tensors(1.5), *log.manifests)
    assert path.read_bytes() == before
    assert len(log.manifests) == 1


def test_flush_times_out(publish: Any, log: Log) -> None:
    log.gate.clear()
    publish(1)
    with pytest.raises(TimeoutError, match=r"version 1\.1 was not published after 0\.05 s"):
        flush(publish, 0.05)
    log.gate.set()
    flush(publish)
    assert len(log.manifests) == 1


@pytest.mark.parametrize("number", [3, 2])
def test_publish_raises_for_a_version_that_does_not_increase(publish: Any, number: int) -> None:
    _published(publish, 3)
    with pytest.raises(ValueError, match=rf"version 1\.{number} does not follow 1\.3"):
        publish(number)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"large": np.zeros(5, np.float32)}, "'large' does not fit into 16384 bytes: an array of 20 bytes"),
        ({"extra": np.zeros(1)}, r"missing \[\], unexpected \['extra'\]"),
    ],
)
def test_publish_raises_for_tensors_that_do_not_match(
    store: WeightStore, log: Log, change: dict[str, Any], message: str
) -> None:
    publisher = Publisher(store, log, SPECS)
    how: dict[str, Any] = {"step": 1, "batches": (), "batch_offsets": (), "trajectories_trained": 0}
    with pytest.raises(ValueError, match=message):
        publisher.publish(tensors() | change, PolicyVersion(1, 1), **how)
    assert list(store.root.glob("[0-9]*.partial")) == []
    assert publisher.publish(tensors(), PolicyVersion(1, 1), **how)
    publisher.close(TIMEOUT_S)


def test_publisher_reserves_memory_for_the_next_version(publish: Any, store: WeightStore) -> None:
    spare = store.root / "spare.partial"
    flush(publish)
    first = spare.stat().st_ino
    _published(publish, 1)
    second = spare.stat().st_ino
    _published(publish, 2)
    inodes = [store.path(PolicyVersion(1, number)).stat().st_ino for number in (1, 2)]
    assert inodes == [first, second]


def test_publish_raises_when_the_store_was_removed(publish: Any, store: WeightStore) -> None:
    flush(publish)
    store.close()
    remove_store(store.root, in_use=True)
    with pytest.raises(StoreError, match="was removed"):
        publish(1)


def _published(publish: Any, number: int) -> PolicyVersion:
    publish(number)
    flush(publish)
    return PolicyVersion(1, number)
