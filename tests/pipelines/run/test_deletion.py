"""`laminar runs delete`: what it refuses, frees and leaves, and a kill in the middle."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.store.ownership import open_folder, stores_of
from infra.store.weight_store import WeightStore
from pipelines.inspect.run_folders import list_runs, read_run
from pipelines.inspect.submissions import Submission
from pipelines.run.deletion import DeletionRefused, bytes_of, delete_run, plan_deletion
from schemas.records import PolicyVersion
from schemas.release import RELEASE

Start = Callable[..., subprocess.CompletedProcess[str]]


def make_run(runs: Path, name: str = "first", **state: Any) -> Path:
    folder = runs / name
    (folder / "logs").mkdir(parents=True)
    known = {"release": RELEASE, "run": name, "started_at": 1.0, "ended_at": 2.0, "phase": "ended", **state}
    (folder / "state.json").write_text(json.dumps(known))
    (folder / "logs" / "light.log").write_bytes(bytes(100_000))
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the real command in the folder of the folder `runs`; `before` runs first in its process."""

    def run(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
        code = f"import os, shutil\n{before}\nfrom pipelines.cli.main import main; main()"
        command = [sys.executable, "-W", "ignore", "-c", code, "runs", *words]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_delete_confirms_then_removes_run_links_and_latest(start: Start, tmp_path: Path) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.txt").write_bytes(bytes(5000))
    folder = make_run(runs)
    (folder / "data").symlink_to(outside)
    (folder / "logs" / "file").symlink_to(outside / "kept.txt")
    os.link(outside / "kept.txt", folder / "linked.txt")
    (runs / "latest").symlink_to("first")
    asked = start("delete", "first")
    assert (asked.returncode, "must come from a terminal; elsewhere use --yes" in asked.stdout) == (1, True)
    assert "run first: 97.7 KiB in runs/first" in asked.stderr
    assert folder.is_dir()
    done = start("delete", "first", "--yes", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["deleted"], found["runs"][0]["run"]) == (0, True, "first")
    assert 100_000 < found["freed_bytes"] < 101_000  # what links name is not freed
    assert list(runs.iterdir()) == []
    assert (outside / "kept.txt").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "first/../first", "/tmp", "latest", ".first.deleting"])
def test_delete_refuses_names_that_are_no_run_of_the_folder(tmp_path: Path, name: str) -> None:
    make_run(tmp_path)
    (tmp_path / "latest").symlink_to("first")
    with pytest.raises(DeletionRefused, match=r"is no name of a run|is a link to first"):
        plan_deletion(tmp_path, name)


def test_delete_refuses_a_run_with_live_processes(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs, "ended")
    make_run(runs, "running", ended_at=None, pid=os.getpid())
    refused = start("delete", "ended", "running", "--yes")
    assert (refused.returncode, "run running is running: " in refused.stderr) == (1, True)
    died = make_run(runs, "died", ended_at=None, pid=None)
    (died / "alive").mkdir()
    report = died / "alive" / "trainer.json"
    report.write_text(json.dumps({"pid": os.getpid()}))
    with pytest.raises(DeletionRefused, match=rf"processes of it are alive: trainer \(process {os.getpid()}\)"):
        plan_deletion(runs, "died")
    os.utime(report, (time.time() - 60,) * 2)
    assert plan_deletion(runs, "died").freed_bytes > 0
    assert {each.run for each in list_runs(runs)} == {"ended", "running", "died"}


def test_delete_refuses_a_run_of_another_container(start: Start, tmp_path: Path) -> None:
    """Whose processes are not seen here: only the lock of its zygote shows that it runs."""
    folder = make_run(tmp_path / "runs", ended_at=None, phase="training", pid=2**22 + 1, host="other")
    log = folder / "logs" / "zygote.log"
    with log.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeletionRefused, match="run first runs on other: stop it there"):
            plan_deletion(tmp_path / "runs", "first")
        assert "run first: running on other, training" in start("status").stdout
        assert start("stop").stderr == "laminar: run first runs on other: stop it there\n"
        state = (folder / "state.json").read_text()
        (folder / "state.json").write_text(state.replace("other", os.uname().nodename))
        with pytest.raises(DeletionRefused, match=r"alive: its roles, here or in another container\. Stop them"):
            plan_deletion(tmp_path / "runs", "first")
        (folder / "state.json").write_text(state)
    assert read_run(folder).status == "died"


def test_delete_refuses_a_detached_role_of_another_container(tmp_path: Path) -> None:
    submission = Submission(tmp_path / "first", "score", 0, "embedded", pid=2**22 + 1, pid_created=1.0)
    submission.file.parent.mkdir(parents=True)
    submission.write()
    submission.log.parent.mkdir()
    with submission.log.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeletionRefused, match=r"alive: score of `laminar submit`, in another container\."):
            plan_deletion(tmp_path, "first")
    assert plan_deletion(tmp_path, "first").stores == {}


def test_killed_deletion_is_listed_and_ended_by_the_next(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs)
    kill = "shutil.rmtree = lambda path: (os.unlink(path / 'state.json'), os.kill(os.getpid(), 9))"
    assert start("delete", "first", "--yes", before=kill).returncode == -9
    (listed,) = json.loads(start("list", "--json").stdout)
    assert (listed["run"], listed["status"]) == ("first", "deleting")
    assert start("resume", "--run", "first").returncode == 1
    make_run(runs)  # a new run of the same name
    assert [each.status for each in list_runs(runs)] == ["ended", "deleting"]
    assert start("delete", "first", "--yes").returncode == 0
    assert list(runs.iterdir()) == []


def test_delete_restores_a_run_that_was_started_meanwhile(tmp_path: Path) -> None:
    planned = plan_deletion(tmp_path, make_run(tmp_path).name)
    (tmp_path / "first" / "state.json").write_text(
        json.dumps({"release": RELEASE, "run": "first", "pid": os.getpid(), "phase": "training"})
    )
    with pytest.raises(DeletionRefused, match="was started meanwhile"):
        delete_run(planned)
    assert [each.status for each in list_runs(tmp_path)] == ["running"]


def test_delete_removes_the_store_of_its_run_only(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    folder, other = make_run(tmp_path / "runs"), make_run(tmp_path / "runs", "other")
    locks = [open_folder(memory / f"laminar-{run.name}", run) for run in (folder, other)]
    (memory / "laminar-first" / "1.0.safetensors").write_bytes(bytes(4096))
    with pytest.raises(DeletionRefused, match="a process uses its weight store"):
        plan_deletion(tmp_path / "runs", "first", memory)
    for lock in locks:
        lock.release()
    planned = plan_deletion(tmp_path / "runs", "first", memory)
    assert sum(planned.stores.values()) >= 4096
    delete_run(planned)
    assert stores_of(folder, memory) == []
    assert [store for store, _ in stores_of(other, memory)] == [memory / "laminar-other"]


def test_delete_removes_the_copies_on_disk(tmp_path: Path) -> None:
    folder, copies = make_run(tmp_path / "runs"), tmp_path / "disk" / "first" / "relay-0"
    (folder / "config.toml").write_text(f"[relay]\ndisk_folder = '{tmp_path}/disk'\n")
    with WeightStore(copies) as store, store.begin(PolicyVersion(1, 1), 4096) as copy:
        copy.seal()
    other = tmp_path / "disk" / "other" / "relay-0"
    other.mkdir(parents=True)
    planned = plan_deletion(tmp_path / "runs", "first", tmp_path / "memory")
    assert planned.stores[copies] >= 4096
    delete_run(planned)
    assert not copies.exists()
    assert other.exists()


def test_bytes_of_count_a_file_with_two_links_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(10))
    os.link(tmp_path / "one", tmp_path / "two")
    assert bytes_of(tmp_path) == 10
