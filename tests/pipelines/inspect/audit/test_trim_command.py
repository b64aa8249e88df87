"""`laminar runs trim`: its output, its effect with --execute and none without, refusals, and invalid versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trimmed_run import TrimmedRun

from infra.kafka.broker import Broker
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.learner_state import LearnerState
from pipelines.config import load_config, save_config
from pipelines.inspect.audit.trim_points import newest_trim_point
from pipelines.inspect.run_files import CONFIG_FILE, STATE_FILE
from pipelines.inspect.submissions import Submission
from pipelines.trim.cuts import Cut, LogPartition
from pipelines.trim.plan import freed_bytes
from schemas.records import PolicyVersion
from schemas.release import RELEASE

Trim = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(broker: Broker, run_id: str) -> Iterator[TrimmedRun]:
    made = TrimmedRun(broker, run_id)
    made.train(3)
    made.commit_all()
    yield made
    made.producer.close()


@pytest.fixture
def folder(run: TrimmedRun, tmp_path: Path) -> Path:
    """The folder of the run, without a checkpoint."""
    folder = tmp_path / run.run
    folder.mkdir()
    changes = [f"run.name={run.run}", f"run.folder={tmp_path}"]
    example = Path(__file__).parents[4] / "examples" / "chain_sum.toml"
    save_config(load_config(example, changes), folder / CONFIG_FILE)
    (folder / STATE_FILE).write_text(json.dumps({"run": run.run, "release": RELEASE}))
    return folder


@pytest.fixture
def trim(run: TrimmedRun, folder: Path, laminar: Trim) -> Trim:
    return lambda *words: laminar("runs", "trim", "--run", run.run, "--folder", str(folder.parent), *words)


@pytest.fixture
def checkpoint(folder: Path) -> None:
    """A checkpoint of version 1.2."""
    state = LearnerState({"w": torch.zeros(2)}, {}, torch.get_rng_state(), 2, 0)
    write_checkpoint(folder / "checkpoints", state, TrainerPosition(PolicyVersion(1, 2), (2,), 8))


@pytest.mark.usefixtures("checkpoint")
def test_trim_without_execute_shows_its_plan_and_deletes_nothing(run: TrimmedRun, trim: Trim, folder: Path) -> None:
    (folder / "kafka" / "log" / f"laminar.{run.run}.batches-0").mkdir(parents=True)
    code, text, error = trim()
    assert code == 0
    begun = ["connecting to", "auditing the whole log", "searching the first record", "auditing what would remain"]
    assert [line.startswith(each) for each, line in zip(begun, error.splitlines(), strict=True)] == [True] * 4
    assert "on disk: 0 bytes. Kafka deletes whole segments" in text
    assert "this trim frees nothing, and the log of a run that has ended does not grow: `" in text
    assert f"runs delete {folder}` frees all of it" in text
    assert f"the log of run {run.run} would begin at version 1.2" in text
    assert "Dry run: nothing was deleted. Use --execute." in text
    assert set(run.begins().values()) == {0}
    assert newest_trim_point(run.client, run.run) is None


@pytest.mark.usefixtures("checkpoint")
def test_trim_with_execute_deletes_and_keeps_the_checkpoint(
    run: TrimmedRun, trim: Trim, folder: Path, laminar: Trim
) -> None:
    code, text, _ = trim("--execute", "--json")
    found = json.loads(text)
    assert (code, found["executed"], found["version"], found["trim_point"]) == (0, True, "1.2", 1)
    deleted = {row["partition"]: row["to"] for row in found["partitions"]}
    assert deleted["batches:0"] == run.begins()["batches"] == 2
    assert found["checkpoint"] == "trim-points/1.2"
    kept = list((folder / "trim-points" / "1.2").iterdir())
    assert kept
    assert all(file.samefile(folder / "checkpoints" / "1.2" / file.name) for file in kept)  # they take no space
    _, _, note = laminar("topics", "find", "settled", "--run", run.run, "-n", "1")
    assert "earlier records of settled were deleted: `laminar runs trim` let the log begin at version 1.2" in note
    code, text, _ = trim("--execute", "--json")
    assert code == 1
    assert "1.2 is not newer" in json.loads(text)["refused"]


@pytest.mark.usefixtures("checkpoint")
def test_trim_finds_the_checkpoints_of_a_submitted_run(run: TrimmedRun, trim: Trim, folder: Path) -> None:
    """Its folder has no config.toml; the trainer's configuration says where they are, and another role's does not."""
    config = load_config(folder / CONFIG_FILE)
    for pipeline in ("evaluation", "trainer"):
        submission = Submission(folder, pipeline, 0, "embedded", state="ended")
        submission.file.parent.mkdir(exist_ok=True)
        submission.write()
        elsewhere = replace(config, run=replace(config.run, folder="/nowhere"))
        kafka = replace(config.kafka, bootstrap_servers=run.client.bootstrap_servers)
        save_config(replace(config if pipeline == "trainer" else elsewhere, kafka=kafka), submission.config)
    for name in (CONFIG_FILE, STATE_FILE):
        (folder / name).unlink()
    code, text, error = trim("--execute", "--json")
    assert code == 0, error
    assert json.loads(text)["checkpoint"] == "trim-points/1.2"


@pytest.mark.parametrize(
    ("words", "reason"), [((), "has no checkpoint yet"), (("--version", "1.1"), "version 1.1 is not an ancestor")]
)
def test_trim_without_checkpoint_is_refused(run: TrimmedRun, trim: Trim, words: tuple[str, ...], reason: str) -> None:
    code, text, error = trim("--execute", *words)
    assert code == 1, error
    assert reason in " ".join(text.split()), error
    assert set(run.begins().values()) == {0}


def test_freed_bytes_are_of_segments_below_the_cut(tmp_path: Path) -> None:
    cut = Cut(0, 20, 20, 500, "", "the end of the topic")
    plan: Any = SimpleNamespace(run="r", cuts={LogPartition("batches", 0): cut, LogPartition("relay", 0): cut})
    for folder in ("laminar.r.batches-0", "laminar.r.batches-10"):
        (tmp_path / folder).mkdir()
        for base, size in ((0, 100), (20, 70), (25, 7)):
            (tmp_path / folder / f"{base:020}.log").write_bytes(bytes(size))
    assert freed_bytes(tmp_path, plan) == 100


def test_trim_names_an_invalid_version(trim: Trim) -> None:
    code, _, error = trim("--version", "newest")
    assert code == 2
    assert "--version" in error
    assert "newest" in error


def test_lineage_ends_at_the_trim_point_and_reports_it(run: TrimmedRun, laminar: Trim) -> None:
    run.trim("1.2")
    place = ("--run", run.run, "-b", run.servers, "--depth", "0")
    code, text, error = laminar("lineage", "latest", *place)
    assert code == 0, error
    assert "the log before this version is deleted; trim point 1 has its counts" in text
    code, text, _ = laminar("lineage", "latest", *place, "--json")
    steps = json.loads(text)
    assert [(each["version"], each["trim_point"]) for each in steps] == [("1.3", None), ("1.2", 1)]
    assert [each["trajectories"] for each in steps] == [4, 0]


def test_audit_begins_at_the_trim_point_and_reports_it(run: TrimmedRun, laminar: Trim) -> None:
    """Of the 18 trajectories of three batches the 12 of the first two are closed, and the last evaluation."""
    code, text, _ = laminar("runs", "audit", "--run", run.run, "--json")
    assert (code, json.loads(text)["begins_at"]) == (0, None)
    run.trim("1.2")
    code, text, error = laminar("runs", "audit", "--run", run.run)
    assert code == 0, error
    assert "        18  dispatched" in text
    line = "the log begins at version 1.2: 13 of these trajectories are counts of trim point 1"
    assert text.splitlines()[-1] == line
    code, text, _ = laminar("runs", "audit", "--run", run.run, "--json")
    found = json.loads(text)
    assert (code, found["passed"], found["dispatched"]) == (0, True, 18)
    assert found["begins_at"] == {"trim_point": 1, "version": "1.2", "trimmed_at": 7}
