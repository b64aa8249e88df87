"""Copies of versions in an object store: the newest are kept, complete or not at all, and a store that refuses stops
nothing."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import object_store
from waiting import until

from infra.storage import RemotePath, StorageFolder, list_folder, open_storage
from infra.store.object_tier import ObjectTier
from infra.store.sealed_objects import has_version, sealed_versions
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion

_BUCKETS = itertools.count()
"""Servers in one process have the same buckets."""


def version(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


@pytest.fixture(params=["object store", "mounted folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageFolder]:
    if request.param == "mounted folder":
        yield tmp_path / "shared" / "run"
    else:
        with object_store() as server:
            yield open_storage(server.bucket(f"weights-{next(_BUCKETS)}")) / "run"


def names_in(folder: StorageFolder) -> list[str]:
    return [file.name for file in list_folder(folder)]


def test_newest_versions_are_kept_with_their_seals(store: WeightStore, folder: StorageFolder) -> None:
    with ObjectTier(store, folder, 2, 0.0) as tier:
        for number in (1, 2, 4):
            tier.keep(version(number))
            until(lambda number=number: version(number) in sealed_versions(folder))  # type: ignore[misc]
        until(lambda: len(names_in(folder)) == 4)
        assert names_in(folder) == ["1.2.json", "1.2.safetensors", "1.4.json", "1.4.safetensors"]
        digest = store.seal(version(4)).blake3
        assert tier.has(version(4), digest)
        assert not tier.has(version(4), "another")
        assert not tier.has(version(1), store.seal(version(1)).blake3)
        data = bytearray(600)
        with tier.reading(version(4)) as source:
            source.read_into(400, memoryview(data))
        assert data == b"\4" * 600


def test_copy_that_a_close_ends_is_none_and_is_removed(store: WeightStore, folder: StorageFolder) -> None:
    tier = ObjectTier(store, folder, 1, 0.0)
    tier.close()
    tier.copy(version(1))
    assert names_in(folder) == ["1.1.safetensors"]
    assert sealed_versions(folder) == []
    with ObjectTier(store, folder, 1, 0.0) as again:
        again.keep(version(2))
        until(lambda: names_in(folder) == ["1.2.json", "1.2.safetensors"])


def test_copies_begin_at_most_so_often(store: WeightStore, tmp_path: Path) -> None:
    with ObjectTier(store, tmp_path / "shared", 1, 3600.0) as tier:
        tier.keep(version(1))
        until(lambda: sealed_versions(tmp_path / "shared") == [version(1)])
        tier.keep(version(2))
        time.sleep(0.1)
        assert names_in(tmp_path / "shared") == ["1.1.json", "1.1.safetensors"]


def test_copy_that_is_there_is_not_written_again(store: WeightStore, tmp_path: Path) -> None:
    """A new master, or the same after a restart, has nothing to do."""
    for _ in range(2):
        with ObjectTier(store, tmp_path, 1, 0.0) as tier:
            tier.copy(version(3))
        written = (tmp_path / "1.3.safetensors").stat().st_ino, (tmp_path / "1.3.safetensors").stat().st_mtime_ns
    with ObjectTier(store, tmp_path, 1, 0.0) as tier:
        tier.copy(version(3))
    found = (tmp_path / "1.3.safetensors").stat()
    assert (found.st_ino, found.st_mtime_ns) == written


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b'"text"', b"{" * 10_000, b"[" * 10_000])
def test_damaged_seal_is_no_seal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.1.safetensors").write_bytes(b"data")
    (tmp_path / "1.1.json").write_bytes(content)
    assert not has_version(tmp_path, version(1), "digest")


def test_store_that_refuses_is_reported(store: WeightStore, caplog: pytest.LogCaptureFixture) -> None:
    with object_store() as server:
        folder = RemotePath(server.uri("no-such-bucket/folder"))
        with caplog.at_level(logging.WARNING), ObjectTier(store, folder, 1, 0.0) as tier:
            tier.keep(version(1))
            until(lambda: "version 1.1 could not be copied to s3://no-such-bucket/folder" in caplog.text)
