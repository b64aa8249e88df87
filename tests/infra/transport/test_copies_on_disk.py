"""A relay with an empty memory takes from its machine's disk what is there, and fetches the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from relays_here import CHUNK, Machine, configure, delta_of, machines, manifest_of, store_version, until, weights

from infra.store.weight_store import WeightStore


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore(tmp_path / "copies") as opened:
        yield opened


def received(machine: Machine) -> int:
    return machine.node.receiving.bytes_passed


def test_version_on_disk_is_not_fetched(disk: WeightStore) -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    store_version(disk, manifest, data)
    with machines(1) as (master,), closing(Machine(1, copies=disk)) as starting:
        store_version(master.store, manifest, data)
        configure([master, starting], manifest)
        until(lambda: starting.has("1.1"))
        assert starting.bytes_of("1.1") == data.tobytes()
        assert received(starting) == 0


def test_version_on_disk_is_served_without_a_master(disk: WeightStore) -> None:
    """After the whole cluster has lost its memory, one disk is enough for all."""
    data = weights(2)
    manifest = manifest_of("1.1", data)
    store_version(disk, manifest, data)
    with machines(1, first=1) as (other,), closing(Machine(0, copies=disk)) as starting:
        configure([starting, other], manifest)
        until(lambda: other.has("1.1"))
        assert other.bytes_of("1.1") == data.tobytes()


def test_delta_is_applied_to_its_parent_on_disk(disk: WeightStore) -> None:
    old = weights(3)
    new = old.copy()
    new[-400:] ^= 1
    parent = manifest_of("1.1", old)
    delta, short = delta_of(parent, old, new)
    child = manifest_of("1.2", new, delta=short)
    store_version(disk, parent, old)
    with machines(1) as (master,), closing(Machine(1, copies=disk)) as starting:
        for manifest, data in ((parent, old), (child, new)):
            store_version(master.store, manifest, data)
        master.store.add_delta(child.version, delta)
        configure([master, starting], child)
        until(lambda: starting.has("1.2"))
        assert starting.bytes_of("1.2") == new.tobytes()
        assert received(starting) == len(delta)


def test_damaged_chunks_of_a_copy_are_fetched(disk: WeightStore) -> None:
    data = weights(4)
    manifest = manifest_of("1.1", data)
    store_version(disk, manifest, data)
    copy = disk.path(manifest.version)
    copy.chmod(0o600)
    damaged = np.fromfile(copy, np.uint8)
    damaged[5 * CHUNK : 5 * CHUNK + 9] ^= 255
    damaged.tofile(copy)
    with machines(1) as (master,), closing(Machine(1, copies=disk)) as starting:
        store_version(master.store, manifest, data)
        configure([master, starting], manifest)
        until(lambda: starting.has("1.1"))
        assert starting.bytes_of("1.1") == data.tobytes()
        assert received(starting) == CHUNK


def test_other_bytes_of_a_version_on_disk_are_not_used(disk: WeightStore) -> None:
    data, other = weights(5), weights(6)
    manifest = manifest_of("1.1", data)
    store_version(disk, manifest_of("1.1", other), other)
    with machines(1) as (master,), closing(Machine(1, copies=disk)) as starting:
        store_version(master.store, manifest, data)
        configure([master, starting], manifest)
        until(lambda: starting.has("1.1"))
        assert received(starting) == len(data)
