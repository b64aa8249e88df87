"""What `kill -9` leaves: whole versions, no pins, and nothing that the next writer does not clear away."""

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


def assert_whole(store: WeightStore) -> None:
    """Every version that is visible is what its seal says."""
    for version in store.versions():
        data = store.path(version).read_bytes()
        seal = store.seal(version)
        assert (len(data), blake3(data).hexdigest()) == (seal.bytes, seal.blake3)


@pytest.mark.parametrize(
    ("point", "visible"),
    [("begun", False), ("half", False), ("hashed", False), ("seal written", False), ("visible", True)],
)
def test_a_writer_killed_at_any_point_leaves_a_whole_version_or_none(root: Path, point: str, visible: bool) -> None:
    with WeightStore(root) as store:
        add(store, FIRST)
    writer = start("write-and-die", root, point)
    writer.communicate(timeout=20)
    assert writer.returncode == -signal.SIGKILL
    with WeightStore(root) as store:
        assert store.versions() == ([SECOND, FIRST] if visible else [FIRST])
        assert_whole(store)
        assert any(root.glob(f"*{PARTIAL}")) is not visible
        add(store, THIRD)
        left = {path.name for path in root.glob(f"*{PARTIAL}")} | {path.name for path in root.glob(f"[0-9]*{SIDECAR}")}
        assert left == {f"{version}{SIDECAR}" for version in store.versions()}


def test_a_writer_killed_at_random_is_followed_by_another(root: Path) -> None:
    moment = random.Random(7)
    unfinished = 0
    for epoch in range(1, 13):
        writer = start("write", root, epoch)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "1\n"
        time.sleep(moment.uniform(0, 0.02))
        writer.kill()
        writer.communicate(timeout=20)
        unfinished += any(root.glob(f"*{PARTIAL}"))
        with WeightStore(root) as store:
            newest = store.newest()
            assert newest is not None
            assert newest.epoch == epoch
            assert 1 <= len(store.versions()) <= 3  # killed before it could evict
            assert_whole(store)
    assert unfinished, "no writer was killed in the middle of a version: the test shows nothing"


def test_a_killed_reader_lets_go_of_its_version(root: Path) -> None:
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


def test_readers_never_see_a_torn_version(root: Path) -> None:
    with WeightStore(root, keep=2) as store:
        readers = [start("read", root, 60) for _ in range(2)]
        deadline = time.monotonic() + 60
        number = 0
        while time.monotonic() < deadline and (number < 50 or any(reader.poll() is None for reader in readers)):
            number += 1
            add(store, PolicyVersion(1, number))
            store.evict()
        seen = [json.loads(reader.communicate(timeout=20)[0]) for reader in readers]
        assert len(store.versions()) == 2
    assert [(counts["whole"], counts["wrong"]) for counts in seen] == [(60, 0)] * 2, seen
    assert sum(path.stat().st_size for path in root.iterdir()) < SIZE * 3
