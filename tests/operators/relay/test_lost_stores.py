"""A relay under which the memory of its machine is lost: files, or the whole store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from record_factories import status, version
from relay_folds import DATA, Relay, add, manifest, relay, store

from infra.store.errors import StoreBusy
from infra.store.ownership import StoreMarks, claim_store, is_used, read_marks
from infra.store.weight_store import WeightStore
from schemas.records import RelayChain

__all__ = ["relay", "store"]
"""Fixtures."""


def test_relay_awaits_lost_versions_again(relay: Relay, store: WeightStore) -> None:
    """Files that vanish without being evicted, as from a cleared shared memory."""
    manifests = [manifest("1.0"), add(store, "1.1"), add(store, "1.2")]
    assert relay.held(*manifests) == ("1.2", "1.1")
    for file in store.root.glob("1.*"):
        file.unlink()
    assert relay.held() == ()
    assert relay.checkpoint()[0] == 1  # a restart reads the manifests of both
    add(store, "1.2")
    assert relay.held() == ("1.2",)
    assert relay.held(add(store, "1.3"), add(store, "1.4")) == ("1.4", "1.3")
    assert relay.checkpoint()[0] == 3  # 1.1 and 1.2 would be evicted on arrival


@pytest.mark.parametrize("whole", [True, False], ids=["folder", "files"])
def test_relay_creates_a_removed_store_again(whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise it would try for ever in a folder that nobody creates."""
    root = tmp_path / "store"
    claim_store(root, "cluster-1", tmp_path).release()
    relay, trainer = Relay(root, keep_versions=2), WeightStore(root)
    needed = RelayChain(1, (), (), "chain", 0, needed=(version(0),))
    first, second = add(trainer, "1.0"), add(trainer, "1.1")
    assert relay.held(first, second, needed) == ("1.1", "1.0")
    if whole:
        shutil.rmtree(root)
    else:
        for file in root.iterdir():
            file.unlink()
    assert relay.held(status(0, version(1))) == ()
    assert [each for each in caplog.messages if "was removed: the versions that are needed are fetched" in each]
    assert relay.checkpoint()[0] == 0
    assert trainer.live_versions() == [version(0), version(1)]
    assert read_marks(root) == StoreMarks(str(tmp_path), "cluster-1")
    assert is_used(root)
    arriving = trainer.begin(version(1), len(DATA))  # it becomes the writer of the new store
    with pytest.raises(StoreBusy), WeightStore(root) as other:
        other.begin(version(2), 1)
    arriving.view[:] = DATA
    arriving.seal(second.blake3)
    assert relay.held() == ("1.1",)
    trainer.close()
    relay.fold.close()
