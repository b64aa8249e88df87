"""A relay that no other can give a version reads it from the object store, and trusts no byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from object_store import object_store
from relays_here import CHUNK, Machine, configure, machines, manifest_of, store_version, until, weights

from infra.storage import RangeReader, open_storage
from infra.store.object_tier import ObjectTier
from infra.store.weight_store import WeightStore
from infra.transport.chunk_registry import BlobBuffer
from infra.transport.chunked_blob import full_blob
from infra.transport.tier_chunks import read_chunks
from schemas.records import WeightVersion

DATA = weights(1)
MANIFEST = manifest_of("1.1", DATA)


def received(machine: Machine) -> int:
    return machine.node.receiving.bytes_passed


@pytest.fixture
def source(tmp_path: Path) -> Iterator[WeightStore]:
    """A machine's store with version 1.1, which no relay serves."""
    with WeightStore(tmp_path / "source") as opened:
        store_version(opened, MANIFEST, DATA)
        yield opened


@pytest.fixture
def objects(source: WeightStore, tmp_path: Path) -> Iterator[ObjectTier]:
    """A mounted folder with version 1.1."""
    with ObjectTier(source, tmp_path / "shared", 1, 0.0) as tier:
        tier.copy(MANIFEST.version)
        yield tier


def starts_alone(objects: ObjectTier, *manifests: WeightVersion) -> Machine:
    """The master of a run, with an empty memory and no other relay."""
    machine = Machine(0, objects=objects)
    configure([machine], *manifests)
    return machine


def test_relay_without_another_reads_the_object_store(source: WeightStore) -> None:
    with object_store() as server, ObjectTier(source, open_storage(server.bucket("weights")), 1, 0.0) as remote:
        remote.copy(MANIFEST.version)
        with closing(starts_alone(remote, MANIFEST)) as machine:
            until(lambda: machine.has("1.1"))
            assert machine.bytes_of("1.1") == DATA.tobytes()
            assert received(machine) == 0


def test_version_of_another_relay_is_not_read(objects: ObjectTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RangeReader, "read_into", lambda *arguments: pytest.fail("read from the object store"))
    with machines(1) as (master,), closing(Machine(1, objects=objects)) as starting:
        store_version(master.store, MANIFEST, DATA)
        configure([master, starting], MANIFEST)
        until(lambda: starting.has("1.1"))
        assert received(starting) == len(DATA)


def test_relay_serves_what_it_has_read(objects: ObjectTier) -> None:
    with machines(1, first=1) as (other,), closing(Machine(0, objects=objects)) as starting:
        configure([starting, other], MANIFEST)
        until(lambda: other.has("1.1"))
        assert other.bytes_of("1.1") == DATA.tobytes()


def damage(objects: ObjectTier, *, to: int | None = None) -> None:
    file = Path(str(objects.folder)) / "1.1.safetensors"
    data = np.fromfile(file, np.uint8)[:to]
    data[5 * CHUNK : 5 * CHUNK + 9] ^= 255
    data.tofile(file)


@pytest.mark.parametrize("to", [None, 6 * CHUNK + 1], ids=["damaged", "damaged and truncated"])
def test_damaged_copy_gives_its_undamaged_chunks(objects: ObjectTier, to: int | None) -> None:
    damage(objects, to=to)
    blob = full_blob(MANIFEST)
    memory = np.zeros(blob.bytes, np.uint8)
    buffer = BlobBuffer(memoryview(memory), blob)
    assert not read_chunks(objects, blob, buffer, memoryview(memory), lambda: False)
    last = blob.chunks if to is None else 6
    assert buffer.missing() == [5, *range(last, blob.chunks)]
    for chunk in set(range(last)) - {5}:
        assert memory[blob.span(chunk)].tobytes() == DATA[blob.span(chunk)].tobytes()


def test_repaired_copy_is_read(objects: ObjectTier, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(objects)
    attempts = []
    has = objects.has
    monkeypatch.setattr(objects, "has", lambda *arguments: attempts.append(arguments) or has(*arguments))
    with closing(starts_alone(objects, MANIFEST)) as machine:
        until(lambda: len(attempts) > 1)  # the first has ended
        assert not machine.has("1.1")
        DATA.tofile(Path(str(objects.folder)) / "1.1.safetensors")
        until(lambda: machine.has("1.1"))
        assert machine.bytes_of("1.1") == DATA.tobytes()


def test_other_version_in_the_store_is_not_read(objects: ObjectTier) -> None:
    """An earlier run of this name may have left it."""
    other = weights(2)
    with closing(starts_alone(objects, manifest_of("1.1", other))) as machine, machines(1, first=1) as (peer,):
        store_version(peer.store, manifest_of("1.1", other), other)
        configure([peer, machine], manifest_of("1.1", other))
        until(lambda: machine.has("1.1"))
        assert received(machine) == len(other)


def test_store_that_does_not_respond_is_tried_again(objects: ObjectTier, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([OSError("slow down")] * 2)

    def has(*arguments: object) -> bool:
        for refusal in refusals:
            raise refusal
        return True

    monkeypatch.setattr(objects, "has", has)
    with closing(starts_alone(objects, MANIFEST)) as machine:
        until(lambda: machine.has("1.1"))
