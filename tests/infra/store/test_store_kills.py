"""After `kill -9`: complete versions, no pins, and no partial files once the next writer starts."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from blake3 import blake3
from store_processes import SIZE, add, start

from infra.store.names import PARTIAL, SIDECAR
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion

FIRST, SECOND, THIRD = (PolicyVersion(1, number) for number in (1, 2, 3))


def assert_complete(store: WeightStore) -> None:
    """Every visible version matches its seal."""
    for version in store.versions():
        data = store.path(version).read_bytes()
        seal = store.seal(version)
        assert (len(data), blake3(data).hexdigest()) == (seal.bytes, seal.blake3)


@pytest.mark.parametrize(
    ("point", "visible"),
    [("begun", False), ("half", False), ("hashed", False), ("seal written", False), ("visible", True)],
)
def test_killed_writer_leaves_a_complete_version_or_none(root: Path, point: str, visible: bool) -> None:
    with WeightStore(root) as store:
        add(store, FIRST)
    writer = start("write-and-die", root, point)
    writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    with WeightStore(root) as store:
        assert store.versions() == ([SECOND, FIRST] if visible else [FIRST])
        assert_complete(store)
        assert any(root.glob(f"*{PARTIAL}")) is not visible
        add(store, THIRD)
        left = {path.name for path in root.glob(f"*{PARTIAL}")} | {path.name for path in root.glob(f"[0-9]*{SIDECAR}")}
        assert left == {f"{version}{SIDECAR}" for version in store.versions()}


def test_writer_succeeds_one_killed_at_a_random_time(root: Path) -> None:
    delays = random.Random(7)
    interrupted = 0
    for epoch in range(1, 13):
        writer = start("write", root, epoch)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "1\n"
        time.sleep(delays.uniform(0, 0.02))
        writer.kill()
        writer.communicate(timeout=20)
        interrupted += any(root.glob(f"*{PARTIAL}"))
        with WeightStore(root) as store:
            newest = store.newest()
            assert newest is not None
            assert newest.epoch == epoch
            assert 1 <= len(store.versions()) <= 3  # killed before it could evict
            assert_complete(store)
    assert interrupted, "no writer was killed while it wrote a version: the test proves nothing"


def test_killed_reader_releases_its_pin(root: Path) -> None:
    with WeightStore(root, keep=1) as store:
        add(store, FIRST)
        add(store, SECOND)
        reader = start("pin", root, FIRST)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "pinned\n"
        assert store.evict() == []
        reader.kill()
        reader.communicate(timeout=20)
        assert store.evict() == [FIRST]


def test_readers_see_only_complete_versions(root: Path) -> None:
    with WeightStore(root, keep=2) as store:
        readers = [start("read", root, 60) for _ in range(2)]
        deadline = time.monotonic() + 60
        number = 0
        while time.monotonic() < deadline and (number < 50 or any(reader.poll() is None for reader in readers)):
            number += 1
            add(store, PolicyVersion(1, number))
            store.evict()
        results = [json.loads(reader.communicate(timeout=60)[0]) for reader in readers]
        store.evict()  # what the readers had pinned
        assert len(store.versions()) == 2
    assert [(counts["complete"], counts["wrong"]) for counts in results] == [(60, 0)] * 2, results
    assert sum(path.stat().st_size for path in root.iterdir()) < SIZE * 3
