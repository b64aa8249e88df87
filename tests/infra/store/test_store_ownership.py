"""Ownership of stores: stale stores are found and removed, stores of others are not touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import pytest
from store_processes import add, start

from infra import machine
from infra.store.errors import StoreBusy, StoreError
from infra.store.names import SHARED_MEMORY, default_root
from infra.store.ownership import (
    choose_store_folder,
    claim_store,
    open_folder,
    remove_ended_stores,
    remove_store,
    stale_stores,
)
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion


def test_store_is_stale_once_all_its_users_are_gone(tmp_path: Path) -> None:
    root = default_root("run", tmp_path)
    user = start("open", root)
    assert user.stdout is not None
    assert user.stdout.readline() == "open\n"
    with WeightStore(root) as store:
        add(store, PolicyVersion(1, 1))
        assert stale_stores(tmp_path) == []
    assert stale_stores(tmp_path) == []  # the other process still has it open
    with pytest.raises(StoreBusy, match=rf"in use by process {user.pid} on .*, started in {os.getcwd()}"):
        remove_store(root)
    started = psutil.Process(user.pid).create_time()
    user.kill()
    user.communicate(timeout=20)
    (stale,) = stale_stores(tmp_path)
    assert stale.root == root
    assert stale.bytes >= 1 << 20
    assert stale.owner is not None
    assert (stale.owner.pid, stale.owner.started) == (user.pid, started)
    remove_store(root)
    assert stale_stores(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_ended_stores_are_those_unused_for_long(tmp_path: Path) -> None:
    """A run that is being restarted keeps its weights, and so does one that works without a change."""
    for run in ("ended", "restarted", "working", "own"):
        with WeightStore(default_root(run, tmp_path)) as store:
            add(store, PolicyVersion(1, 1))
    for run in ("ended", "working", "own"):
        root = default_root(run, tmp_path)
        for path in (*root.iterdir(), root):
            os.utime(path, (1, 1))
    lock = open_folder(default_root("working", tmp_path))
    assert remove_ended_stores(default_root("own", tmp_path)) == [default_root("ended", tmp_path)]
    lock.release()
    assert {each.root.name for each in stale_stores(tmp_path)} == {
        "laminar-own",
        "laminar-restarted",
        "laminar-working",
    }


def test_process_that_opens_a_stale_store_owns_it(tmp_path: Path) -> None:
    root = default_root("run", tmp_path)
    writer = start("write", root, 1)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.communicate(timeout=20)
    with WeightStore(root) as store:
        assert store.newest() is not None
    (stale,) = stale_stores(tmp_path)
    assert stale.owner is not None
    assert stale.owner.pid == os.getpid()


def test_stale_stores_name_the_folders_of_their_runs(tmp_path: Path) -> None:
    """Stores of one user are told apart, also after a process that does not know the run has opened them."""
    first, second = default_root("gcd-1", tmp_path), default_root("gcd-2", tmp_path)
    open_folder(first, tmp_path / "a" / "gcd").release()
    open_folder(first).release()
    claim_store(second, "cluster", tmp_path / "b" / "gcd").release()
    stale = stale_stores(tmp_path)
    assert [(each.root, each.owner and each.owner.run) for each in stale] == [
        (first, f"{tmp_path}/a/gcd"),
        (second, f"{tmp_path}/b/gcd"),
    ]
    assert f"process {os.getpid()} on " in str(stale[0].owner)
    assert str(stale[0].owner).endswith(f", of the run in {tmp_path}/a/gcd")


def test_store_is_in_use_until_its_run_ends_without_any_role(tmp_path: Path) -> None:
    root = default_root("run", tmp_path)
    supervisor = open_folder(root, tmp_path / "run")
    with WeightStore(root) as store:  # a role, which is killed
        add(store, PolicyVersion(1, 1))
    assert stale_stores(tmp_path) == []
    with pytest.raises(StoreBusy, match=f"in use by process {os.getpid()} .*, of the run in {tmp_path}/run"):
        remove_store(root)
    supervisor.release()
    assert len(stale_stores(tmp_path)) == 1


def test_stale_stores_ignores_other_files(tmp_path: Path) -> None:
    (tmp_path / "laminar-file").write_text("")
    (tmp_path / "laminar-folder").mkdir()
    WeightStore(tmp_path / "other").close()
    assert stale_stores(tmp_path) == []
    assert stale_stores(tmp_path / "missing") == []


def test_a_store_in_use_is_removed(root: Path) -> None:
    with WeightStore(root) as store:
        add(store, PolicyVersion(1, 1))
        store.begin(PolicyVersion(1, 2), 100)
        with store.pin(PolicyVersion(1, 1)):
            store.close()
            remove_store(store.root, in_use=True)
            assert not root.exists()
    remove_store(root)  # a second call does nothing


def test_removal_keeps_files_that_are_not_of_the_store(root: Path) -> None:
    store = WeightStore(root)
    add(store, PolicyVersion(1, 1))
    (root / "thesis.tex").write_text("years of work")
    store.close()
    with pytest.raises(StoreError, match=r"also has thesis\.tex, not of the store"):
        remove_store(store.root, in_use=True)
    assert os.listdir(root) == ["thesis.tex"]


def test_store_opens_again_after_its_removal(root: Path) -> None:
    for _ in range(20):
        old = WeightStore(root)
        old.close()
        remove_store(old.root, in_use=True)
        with WeightStore(root) as new:
            add(new, PolicyVersion(1, 1))


def test_store_raises_for_the_folder_of_another_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user id"):
        WeightStore(root)
    assert os.listdir(root) == []


def test_choose_store_folder_prefers_shared_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_store_folder("run", tmp_path / "run", base=tmp_path) == tmp_path / "laminar-run"
    assert caplog.messages == []
    for base, needed, why in [(tmp_path / "missing", 0, "cannot be used"), (tmp_path, 1 << 62, "has only")]:
        with caplog.at_level(logging.WARNING):
            assert choose_store_folder("run", tmp_path / "run", needed, base) == tmp_path / "run" / "weights"
        (message,) = caplog.messages
        assert why in message
        assert str(tmp_path / "run" / "weights") in message
        caplog.clear()


@pytest.mark.parametrize("run", ["", "../etc", "a/b", "a.b"])
def test_choose_store_folder_rejects_path_separators(run: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be 1-100 letters"):
        choose_store_folder(run, tmp_path)
    assert default_root("ok") == SHARED_MEMORY / "laminar-ok"


def test_claim_store_keeps_the_weights_of_its_cluster(tmp_path: Path) -> None:
    root = default_root("run", tmp_path)
    claim_store(root, "cluster-a").release()
    with WeightStore(root) as store:
        add(store, PolicyVersion(1, 1))
    lock = claim_store(root, "cluster-a")
    claim_store(root, "cluster-a").release()  # of another role
    with WeightStore(root) as store:
        assert store.newest() == PolicyVersion(1, 1)
    lock.release()
    (stale,) = stale_stores(tmp_path)
    assert stale.bytes >= 1 << 20
    remove_store(root)
    assert os.listdir(tmp_path) == []


def test_claim_store_replaces_an_unused_store_of_another_cluster(tmp_path: Path) -> None:
    root = default_root("run", tmp_path)
    claim_store(root, "cluster-a").release()
    with WeightStore(root) as store:
        add(store, PolicyVersion(1, 1))
    claim_store(root, "cluster-b").release()
    with WeightStore(root) as store:
        assert store.newest() is None
    claim_store(root, "cluster-b").release()


def test_claim_store_is_rejected_while_another_cluster_uses_it(tmp_path: Path) -> None:
    root = default_root("run", tmp_path)
    lock = claim_store(root, "cluster-a")
    with pytest.raises(StoreError, match=r"in use by process .* another Kafka cluster: choose another run\.name"):
        claim_store(root, "cluster-b")
    lock.release()
    claim_store(root, "cluster-b").release()


@pytest.mark.parametrize(("owner", "reader", "found"), [("7", "7", 1), ("7", "8", 0), ("", "8", 1), ("7", "", 1)])
def test_stale_stores_of_another_login_as_root_are_skipped(
    owner: str, reader: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same user id; an empty login is not known."""
    login = tmp_path / "loginuid"
    monkeypatch.setattr(machine, "_LOGIN_FILE", login)
    monkeypatch.delenv("SUDO_UID", raising=False)
    login.write_text(owner or str((1 << 32) - 1))
    claim_store(default_root("run", tmp_path), "cluster-a").release()
    login.write_text(reader or str((1 << 32) - 1))
    assert len(stale_stores(tmp_path)) == found


def test_login_user_is_that_of_sudo_without_auditing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LOGIN_FILE", tmp_path / "none")
    monkeypatch.setenv("SUDO_UID", "1001")
    assert machine.login_user() == 1001
    monkeypatch.setenv("SUDO_UID", "x")
    assert machine.login_user() is None
