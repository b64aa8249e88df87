"""The weight store of one process: visibility, eviction, pins, reserved memory, and errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from infra import memory
from infra.store import incoming_version
from infra.store.errors import CorruptVersion, NoRoom, StoreBusy, StoreError, VersionExists, VersionGone
from infra.store.names import default_root
from infra.store.ownership import remove_store
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion

FIRST = PolicyVersion(1, 1)


@pytest.fixture
def store(root: Path) -> Iterator[WeightStore]:
    with WeightStore(root, keep=2) as opened:
        yield opened


def add(store: WeightStore, version: str, data: bytes = b"weights") -> PolicyVersion:
    with store.begin(PolicyVersion.parse(version), len(data)) as incoming:
        incoming.view[:] = data
        incoming.seal()
    return incoming.version


def names(store: WeightStore) -> list[str]:
    return [str(version) for version in store.versions()]


def files(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"owner.json", "users.lock", "writer.lock"}


def test_version_is_visible_only_when_sealed(store: WeightStore) -> None:
    incoming = store.begin(FIRST, 7)
    incoming.view[:] = b"weights"
    assert (store.versions(), store.newest()) == ([], None)
    with pytest.raises(VersionGone, match=r"holds no version 1\.1"):
        store.path(FIRST)
    seal = incoming.seal(blake3(b"weights").hexdigest())
    assert store.versions() == [FIRST]
    assert store.seal(FIRST) == seal
    assert (seal.bytes, seal.blake3) == (7, blake3(b"weights").hexdigest())
    assert store.path(FIRST).read_bytes() == b"weights"


def test_begin_counts_the_limit_of_a_cgroup(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_limits", lambda root: [(100_000, 99_000)])
    with pytest.raises(NoRoom, match="has 1000 bytes free, 1001 are needed"):
        store.begin(FIRST, 1001)
    store.begin(FIRST, 1000).abort()


def test_begin_allocates_exactly_the_requested_size(store: WeightStore) -> None:
    size = 3 * 4096 + 1
    incoming = store.begin(FIRST, size)
    assert (len(incoming.view), incoming.size, incoming.view.readonly) == (size, size, False)
    assert (store.root / "1.1.partial").stat().st_blocks * 512 >= size  # allocated before anything is copied
    incoming.seal()
    assert store.path(FIRST).stat().st_size == size


def test_seal_aborts_bytes_that_do_not_match(store: WeightStore) -> None:
    incoming = store.begin(FIRST, 7)
    with pytest.raises(CorruptVersion, match=r"1\.1 arrived with blake3 .*, expected 00"):
        incoming.seal("00")
    assert files(store.root) == set()
    add(store, "1.1")


def test_aborted_version_leaves_no_files(store: WeightStore) -> None:
    with store.begin(FIRST, 7):
        assert files(store.root) == {"1.1.partial"}
    assert files(store.root) == set()
    incoming = store.begin(FIRST, 7)
    store.close()
    assert files(store.root) == set()
    with pytest.raises(StoreError, match="sealed or aborted already"):
        incoming.seal()


def test_seal_raises_while_a_view_is_held(store: WeightStore) -> None:
    incoming = store.begin(FIRST, 8)
    held = np.frombuffer(incoming.view, np.uint8)
    with pytest.raises(BufferError, match=r"a view of the bytes of version 1\.1 is still held"):
        incoming.seal()
    assert held.sum() == 0
    assert files(store.root) == set()


def test_sealed_file_is_read_only(store: WeightStore) -> None:
    add(store, "1.1")
    assert store.path(FIRST).stat().st_mode & 0o777 == 0o400


def test_begin_raises_while_a_version_is_being_written(store: WeightStore) -> None:
    with store.begin(FIRST, 7), pytest.raises(StoreBusy, match=r"version 1\.1 is still being written"):
        store.begin(PolicyVersion(1, 2), 7)
    add(store, "1.2")


def test_begin_raises_for_an_existing_version(store: WeightStore) -> None:
    add(store, "1.1")
    with pytest.raises(VersionExists, match=r"already has version 1\.1"):
        store.begin(FIRST, 7)
    add(store, "1.2")


@pytest.mark.parametrize(
    ("stored", "keep", "left"),
    [
        (["1.1", "1.2", "1.3"], 2, ["1.3", "1.2"]),
        (["1.1", "1.2", "1.3"], 0, ["1.3"]),
        (["1.9", "1.10"], 1, ["1.10"]),
        (["1.7", "1.8", "1.9", "2.3"], 2, ["2.3", "1.9"]),  # numbers decrease when a trainer restarts
        (["2.3", "1.9"], 1, ["2.3"]),  # an older version that arrived late
        (["1.1"], 3, ["1.1"]),
        ([], 1, []),
    ],
)
def test_evict_keeps_the_newest_versions(store: WeightStore, stored: list[str], keep: int, left: list[str]) -> None:
    for version in stored:
        add(store, version)
    evicted = store.evict(keep)
    assert names(store) == left
    assert {*map(str, evicted), *left} == set(stored)
    assert files(store.root) == {f"{version}.{end}" for version in left for end in ("safetensors", "json")}


def test_evict_keeps_pinned_versions(store: WeightStore) -> None:
    add(store, "1.1", b"first")
    with store.pin(FIRST) as path, store.pin(FIRST):
        for version in ("1.2", "1.3", "1.4"):
            add(store, version)
        assert store.evict(1) == [PolicyVersion(1, 3), PolicyVersion(1, 2)]
        assert path.read_bytes() == b"first"
        assert names(store) == ["1.4", "1.1"]
    assert store.evict(1) == [FIRST]
    with pytest.raises(VersionGone), store.pin(FIRST):
        pass


def test_pin_is_released_after_an_error_and_in_a_fork(store: WeightStore) -> None:
    add(store, "1.1")
    add(store, "1.2")
    with pytest.raises(KeyError), store.pin(FIRST):
        raise KeyError
    read_end, write_end = os.pipe()
    with store.pin(FIRST):
        child = os.fork()
        if child == 0:  # it has the descriptor of the lock until it exits
            os.read(read_end, 1)
            os._exit(0)
    try:
        assert store.evict(1) == [FIRST]
    finally:
        os.write(write_end, b".")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


def test_pin_raises_for_another_blake3(store: WeightStore) -> None:
    add(store, "1.1", b"ours")
    with store.pin(FIRST, blake3(b"ours").hexdigest()) as path:
        assert path.read_bytes() == b"ours"
    with pytest.raises(VersionGone, match=r"another version 1\.1: blake3 .*, wanted ff"), store.pin(FIRST, "ff"):
        pass
    add(store, "1.2")
    assert store.evict(1) == [FIRST]  # the rejected pin was released


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": "1.1"}', '{"version": "1.2", "bytes": 1, "blake3": "00"}', "[]"]
)
def test_seal_raises_for_an_invalid_seal_file(store: WeightStore, text: str) -> None:
    add(store, "1.1")
    (store.root / "1.1.json").write_text(text)
    with pytest.raises(VersionGone, match=r"the seal of version 1\.1"):
        store.seal(FIRST)


def test_begin_raises_no_room_before_creating_files(store: WeightStore) -> None:
    with pytest.raises(NoRoom, match=rf"has \d+ bytes free, {1 << 60} are needed"):
        store.begin(FIRST, 1 << 60)
    assert files(store.root) == set()
    add(store, "1.1")


def test_begin_raises_no_room_for_a_full_file_system(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_version, "free_bytes", lambda folder: 1 << 62)
    with pytest.raises(NoRoom, match=f"cannot store {1 << 61} more bytes"):
        store.begin(FIRST, 1 << 61)
    assert files(store.root) == set()


def test_live_versions_stay_as_they_are_on_a_full_disk(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_live_versions([FIRST])

    def full(path: Path, *args: object, **named: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    store.write_live_versions([PolicyVersion(1, 2)])
    assert store.live_versions() == [FIRST]
    assert "cannot be written: [Errno 28] No space left on device" in caplog.text


def test_reserved_memory_becomes_the_next_version(store: WeightStore) -> None:
    store.reserve(7)
    inode = (store.root / "spare.partial").stat().st_ino
    add(store, "1.1")
    assert store.path(FIRST).stat().st_ino == inode
    store.reserve(7)
    add(store, "1.2", b"of another size")
    assert files(store.root) == {f"{version}.{end}" for version in ("1.1", "1.2") for end in ("safetensors", "json")}
    store.reserve(9)
    store.close()
    assert "spare.partial" not in files(store.root)


def test_new_writer_leaves_a_list_that_another_thread_is_writing(root: Path, store: WeightStore) -> None:
    """A relay receives a version in one thread while another writes the versions that are needed."""
    unfinished = root / "live.json.partial"
    unfinished.write_text("[]")
    add(store, "1.1", b"weights")
    assert unfinished.exists()


def test_reserved_memory_is_kept_until_another_process_writes(root: Path, store: WeightStore) -> None:
    spare = root / "spare.partial"
    store.reserve(100)
    store.release_writer()
    ready = spare.stat().st_ino
    with store.begin(PolicyVersion(1, 1), 100) as incoming:
        incoming.seal()
    assert store.path(PolicyVersion(1, 1)).stat().st_ino == ready
    store.reserve(100)
    store.release_writer()
    with WeightStore(root) as other:
        other.reserve(100)
        theirs = spare.stat().st_ino
        store.drop_lost_spare()
        assert spare.stat().st_ino == theirs
    with store.begin(PolicyVersion(1, 2), 100) as incoming:
        incoming.seal()
    assert len(store.versions()) == 2


def test_stores_of_two_runs_are_independent(root: Path, store: WeightStore) -> None:
    other_root = default_root(f"{root.name}-other", root.parent)
    with WeightStore(other_root) as other:
        add(store, "1.1", b"ours")
        add(other, "1.1", b"theirs")
        assert (store.path(FIRST).read_bytes(), other.path(FIRST).read_bytes()) == (b"ours", b"theirs")
        other.close()
        remove_store(other.root, in_use=True)
    assert not other_root.exists()
    assert store.path(FIRST).read_bytes() == b"ours"


def test_store_has_one_writing_process(root: Path, store: WeightStore) -> None:
    add(store, "1.1")
    with WeightStore(root) as second:
        with pytest.raises(StoreBusy, match=f"process {os.getpid()} writes to {root}"):
            second.begin(PolicyVersion(1, 2), 7)
        assert second.versions() == [FIRST]
        store.close()
        add(second, "1.2")


def test_store_raises_after_it_was_removed(root: Path, store: WeightStore) -> None:
    incoming = store.begin(FIRST, 7)
    remove_store(root, in_use=True)
    with pytest.raises(StoreError, match=r"was removed while version 1\.1 was written"):
        incoming.seal()
    with pytest.raises(StoreError, match="was removed"):
        store.begin(FIRST, 7)
    assert store.versions() == []


@pytest.mark.parametrize("keep", [0, -1])
def test_store_rejects_keep_below_one(root: Path, keep: int) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        WeightStore(root, keep)
