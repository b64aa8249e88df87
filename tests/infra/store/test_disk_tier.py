"""Copies of versions on disk: the newest are kept, whole or not at all, and a full disk stops nothing."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from waiting import until

from infra.store import newest_copier
from infra.store.disk_tier import DiskTier
from infra.store.incoming_version import IncomingVersion
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion


def version(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


def test_newest_versions_are_copied_and_kept(store: WeightStore, tmp_path: Path) -> None:
    with DiskTier(store, tmp_path / "disk", 2) as tier:
        for number in (1, 2, 4):
            tier.keep(version(number))
            until(lambda number=number: version(number) in tier.copies.versions())  # type: ignore[misc]
        tier.keep(version(3))  # an older one than the last
        tier.keep(version(4))
        until(lambda: tier.copies.versions() == [version(4), version(2)])
        with tier.copies.read(version(4), store.seal(version(4)).blake3) as data:
            assert bytes(data) == b"\4" * 1000
    with WeightStore(tmp_path / "disk") as again:  # of the next start
        assert again.versions() == [version(4), version(2)]


def test_copy_that_is_interrupted_leaves_nothing(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest_copier, "PART", 100)
    tier, ends = DiskTier(store, tmp_path / "disk", 1), list[int]()

    def wait_for_close(copy: IncomingVersion, end: int) -> None:
        ends.append(end)
        until(lambda: tier.closed)

    monkeypatch.setattr(IncomingVersion, "hash_to", wait_for_close)
    tier.keep(version(1))
    until(lambda: ends)
    assert any((tmp_path / "disk").glob("*1.1*"))
    tier.close()
    assert ends == [100]
    with WeightStore(tmp_path / "disk") as again:
        assert again.versions() == []
        with again.begin(version(1), 1000):
            pass  # nothing is in its way


def test_disk_without_room_is_reported(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infra.store.incoming_version.free_bytes", lambda folder: 10)
    with caplog.at_level(logging.WARNING), DiskTier(store, tmp_path / "disk", 1) as tier:
        tier.keep(version(1))
        until(lambda: "version 1.1 could not be copied to the disk" in caplog.text)
        assert tier.copies.versions() == []
        monkeypatch.undo()
        tier.keep(version(2))
        until(lambda: tier.copies.versions() == [version(2)])


def test_version_that_is_gone_is_not_copied(store: WeightStore, tmp_path: Path) -> None:
    with DiskTier(store, tmp_path / "disk", 1) as tier:
        tier.keep(version(9))
        tier.keep(version(10))
        time.sleep(0.05)
        assert tier.copies.versions() == []
