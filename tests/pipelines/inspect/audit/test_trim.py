"""Trims on a real broker: which records are deleted or retained, and that the audit's counts stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from audit_records import assignment, manifest, micro_batch, prompt, trajectory
from kafka.errors import KafkaTimeoutError
from role_writer import write_as_role
from trimmed_run import TrimmedRun

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.note import Note
from pipelines.inspect.audit import audit_run
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.trim_points import newest_trim_point
from pipelines.trim import cuts
from pipelines.trim import plan as plan_module
from pipelines.trim.cuts import LogPartition, UnknownGroup
from pipelines.trim.plan import TrimRefused, execute, plan_trim
from schemas.records import CommitNote, PolicyVersion
from schemas.topics import (
    BATCHES,
    INBOX,
    PROMPTS,
    RELAY,
    RESTORE,
    SETTLED,
    TRAJECTORIES,
    TRIM_POINTS,
    Topic,
    group_name,
)


@pytest.fixture
def run(broker: Broker, run_id: str) -> Iterator[TrimmedRun]:
    made = TrimmedRun(broker, run_id)
    made.train(4)
    made.commit_all()
    yield made
    made.producer.close()


def test_audit_has_the_same_counts_after_trims(run: TrimmedRun) -> None:
    run.write(INBOX, assignment("p17.0"))  # still active
    before = audit(run.client, run.run)
    assert (before.trained, before.dropped, before.evaluated, before.in_flight) == (16, 4, 4, {"generation": 1})
    run.trim("1.2")
    assert audit(run.client, run.run) == before
    # The first two batches and all that ended with them; of manifests the one of version 1.2 stays.
    assert run.begins() == dict.fromkeys(("inbox", "trajectories", "experiences", "settled"), 12) | {
        "batches": 2,
        "relay": 2,
    }
    trim_point = newest_trim_point(run.client, run.run)
    assert trim_point is not None
    assert (trim_point.number, str(trim_point.version), trim_point.batch, trim_point.trimmed_at) == (1, "1.2", 1, 7)
    assert dict(zip(trim_point.purposes, trim_point.closed_below, strict=True))["train"] == 8
    run.train(2)
    run.commit_all()
    later = audit(run.client, run.run)
    run.trim("1.5")
    assert audit(run.client, run.run) == later
    again = newest_trim_point(run.client, run.run)
    assert again is not None
    assert (again.number, run.begins()["batches"], run.begins()["relay"]) == (2, 5, 5)
    with pytest.raises(TrimRefused, match=r"1\.5 is not newer"):
        run.plan("1.5")


def test_trim_repeats_deletions_that_were_interrupted(run: TrimmedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before = audit(run.client, run.run)
    with monkeypatch.context() as killed:
        killed.setattr(plan_module, "delete_records", Mock(side_effect=KafkaTimeoutError))
        with pytest.raises(KafkaTimeoutError):
            run.trim("1.2")
    assert set(run.begins().values()) == {0}
    other = PolicyVersion(1, 1)
    with pytest.raises(TrimRefused, match=r"to version 1\.2 was interrupted"):
        plan_trim(run.client, run.run, {other: Path("checkpoints/1.1")}, other)
    again = run.trim("1.2")
    assert {cut.held_by for cut in again.cuts.values()} == {"an interrupted trim"}
    assert (run.begins()["settled"], run.begins()["batches"]) == (12, 2)
    assert audit(run.client, run.run) == before
    with pytest.raises(TrimRefused, match=r"1\.2 is not newer"):
        run.plan("1.2")


def test_second_of_two_trims_at_once_deletes_nothing(run: TrimmedRun) -> None:
    before = audit(run.client, run.run)
    second = replace(run.plan("1.3"), checkpoint=None)
    run.trim("1.2")
    begins = run.begins()
    with pytest.raises(TrimRefused, match=r"another command trims run .*, too: trim it again once that one has ended"):
        execute(run.client, second, Path("nowhere"))
    assert run.begins() == begins
    assert audit(run.client, run.run) == before
    run.trim("1.3")
    assert audit(run.client, run.run) == before


@pytest.fixture
def trimmed_between(run: TrimmedRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """While it has versions, the log is trimmed to the first of them before `batches` is read, after `settled`."""
    versions: list[str] = []
    read_partition = audit_run.read_partition

    def trim_and_read(client: Any, topic: str, *rest: Any) -> Iterator[Any]:
        if topic == BATCHES.name(run.run) and versions:
            version, versions[:] = versions[0], []
            run.trim(version)
        return read_partition(client, topic, *rest)

    monkeypatch.setattr(audit_run, "read_partition", trim_and_read)
    return versions


def test_audit_begins_again_if_log_is_trimmed_meanwhile(
    run: TrimmedRun, trimmed_between: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = audit(run.client, run.run)
    trimmed_between.append("1.2")
    assert audit(run.client, run.run) == before
    assert run.begins()["batches"] == 2
    trimmed_between.append("1.3")
    monkeypatch.setattr(audit_run, "TRIES", 1)
    with pytest.raises(RuntimeError, match="was trimmed during each of 1 audits: audit it again"):
        audit(run.client, run.run)
    assert audit(run.client, run.run) == before


def test_plan_of_a_trim_names_another_trim(run: TrimmedRun, trimmed_between: list[str]) -> None:
    trimmed_between.append("1.2")
    with pytest.raises(TrimRefused, match=r"another command trims run .*, too: trim it again once that one has ended"):
        run.plan("1.3")


def test_plan_trim_is_read_only_and_hashes_the_cut_records(run: TrimmedRun) -> None:
    planned, again = run.plan("1.2"), run.plan("1.2")
    assert set(run.begins().values()) == {0}
    assert newest_trim_point(run.client, run.run) is None
    assert planned.trim_point == again.trim_point
    cut = planned.cuts[LogPartition("batches", 0)]
    assert (cut.begin, cut.offset, cut.records, cut.held_by) == (0, 2, 2, "the checkpoint of version 1.2")
    assert cut.digest != planned.cuts[LogPartition("settled", 0)].digest
    assert planned.trim_point.checkpoint == "trim-points/1.2"


def test_plan_trim_retains_records_of_active_trajectories(run: TrimmedRun) -> None:
    """Its group is the first, so records of higher-numbered trajectories are retained too."""
    late = "p0.5"
    run.write(INBOX, assignment(late))
    plan = run.plan("1.3")
    assert dict(zip(plan.trim_point.purposes, plan.trim_point.closed_below, strict=True))["train"] == 0
    assert plan.cuts[LogPartition("settled", 0)].offset == 0
    assert "trajectory p0" in plan.cuts[LogPartition("settled", 0)].held_by
    assert plan.cuts[LogPartition("relay", 0)].offset == 1  # the manifest that names batch 0 is retained


@pytest.mark.parametrize(
    ("role", "topic", "place"),
    [("score", TRAJECTORIES, "trajectories:0"), ("export-abc", SETTLED, "settled:0")],
)
def test_plan_trim_retains_records_above_committed_offsets(
    run: TrimmedRun, role: str, topic: Topic, place: str
) -> None:
    run.commit(role, topic, 3)
    (cut,) = (cut for where, cut in run.plan("1.3").cuts.items() if str(where) == place)
    assert (cut.offset, cut.held_by) == (3, f"group {group_name(run.run, role)}")


def commit_note(run: TrimmedRun, group: str, note: Note) -> None:
    """Write the first commit note of the run."""
    with admin_client(run.client) as admin:
        create_topics(admin, [TopicSpec(RESTORE.name(run.run), 1)])
    write_as_role(run.client, run.run, RESTORE, [CommitNote(group, note.encode(), 0)], key=group.encode())


def test_plan_trim_retains_records_of_a_ledger(run: TrimmedRun) -> None:
    group = group_name(run.run, "placement")
    commit_note(run, group, Note(3, {f"{INBOX.name(run.run)}:0": 5}, {}, {f"{SETTLED.name(run.run)}:0": 4}))
    cuts = run.plan("1.3").cuts
    assert (cuts[LogPartition("inbox", 0)].offset, cuts[LogPartition("inbox", 0)].held_by) == (
        5,
        f"the ledger of {group}",
    )
    assert (cuts[LogPartition("settled", 0)].offset, cuts[LogPartition("settled", 0)].held_by) == (4, f"group {group}")


@pytest.mark.parametrize(("reader", "topic"), [("export-settled-abc", SETTLED), ("gateway", TRAJECTORIES)])
def test_plan_trim_retains_records_of_a_reader_that_paused(run: TrimmedRun, reader: str, topic: Topic) -> None:
    """Kafka has removed its group's offsets. A person may say that it does not come back."""
    group, place = group_name(run.run, reader, 1), LogPartition(topic.short_name, 0)
    commit_note(run, group, Note(1, offsets={f"{topic.name(run.run)}:0": 3}))
    cut = run.plan("1.3").cuts[place]
    assert (cut.offset, cut.held_by) == (3, f"group {group}")
    assert run.plan("1.3", ignored_groups=[group]).cuts[place].offset > 3
    for wrong in (group_name(run.run, "placement"), f"{group}1"):
        with pytest.raises(UnknownGroup, match=f"no group {wrong} beside those of its roles; the others are .*{group}"):
            run.plan("1.3", ignored_groups=[wrong])


def test_trim_does_not_wait_for_a_rollout_that_has_left(run: TrimmedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    group, relay = group_name(run.run, "rollout", 7), LogPartition("relay", 0)
    commit_note(run, group, Note(1, offsets={f"{RELAY.name(run.run)}:0": 0}))
    cut = run.plan("1.3").cuts[relay]
    assert (cut.offset, cut.held_by) == (0, f"group {group}")
    monkeypatch.setattr(cuts, "LEFT_MANIFESTS", 2)
    assert run.plan("1.3").cuts[relay].offset > 0


def test_audit_after_a_trim_finds_repeated_training(run: TrimmedRun) -> None:
    run.trim("1.2")
    run.write(BATCHES, micro_batch(4, "p0.0"))
    run.write(RELAY, replace(manifest("1.5", "1.4", 4), batch_offsets=(5,)))
    found = audit(run.client, run.run)
    assert found.trained_twice == ("p0.0",)
    assert not found.passed
    with pytest.raises(TrimRefused, match=r"the audit of run .* fails"):
        run.plan("1.4")


def test_audit_after_a_trim_finds_lost_trajectories(run: TrimmedRun) -> None:
    run.trim("1.2")
    run.write(INBOX, assignment("p30.0"))
    run.write(TRAJECTORIES, trajectory("p30.0"))
    run.commit("score", TRAJECTORIES, 10**6)
    assert [each.trajectory_id for each in audit(run.client, run.run).lost] == ["p30.0"]  # lost, not expired


def test_plan_trim_does_not_close_undispatched_prompts(run: TrimmedRun) -> None:
    """Prompt 3 is not dispatched: only the prompts topic names it, and its trajectories are still to come."""
    with admin_client(run.client) as admin:
        create_topics(admin, [TopicSpec(PROMPTS.name(run.run), 1)])
    run.write(PROMPTS, *(prompt("train", number, 1) for number in (2, 3, 4)))
    run.commit("placement", PROMPTS, 1)
    plan = run.plan("1.3")
    assert dict(zip(plan.trim_point.purposes, plan.trim_point.closed_below, strict=True))["train"] == 3
    assert plan.cuts[LogPartition("prompts", 0)].offset == 1
    execute(run.client, replace(plan, checkpoint=None), Path("nowhere"))
    run.write(INBOX, assignment("p3.0"))
    assert audit(run.client, run.run).in_flight == {"generation": 1}


def test_newest_mark_skips_invalid_records(run: TrimmedRun) -> None:
    run.trim("1.2")
    trim_point = newest_trim_point(run.client, run.run)
    run.producer.send(TRIM_POINTS.name(run.run), b"garbage").get(10)
    assert trim_point is not None
    following = replace(trim_point, number=trim_point.number + 1, closed_below=(10**9,) * len(trim_point.purposes))
    run.write(TRIM_POINTS, replace(following, number=9), replace(following, offsets=()), replace(following, counts=()))
    assert newest_trim_point(run.client, run.run) == trim_point


def test_trim_point_that_closes_prompts_to_come_is_skipped(run: TrimmedRun) -> None:
    run.trim("1.2")
    trim_point = newest_trim_point(run.client, run.run)
    assert trim_point is not None
    with admin_client(run.client) as admin:
        create_topics(admin, [TopicSpec(PROMPTS.name(run.run), 1)])
    run.write(PROMPTS, *(prompt("train", number, 1) for number in range(12)))
    following = replace(trim_point, number=trim_point.number + 1)
    everything = replace(following, closed_below=(10**9,) * len(following.purposes))
    run.write(TRIM_POINTS, everything)
    assert newest_trim_point(run.client, run.run) == trim_point
    run.write(TRIM_POINTS, following)
    assert newest_trim_point(run.client, run.run) == following


def test_plan_trim_requires_a_checkpoint(run: TrimmedRun) -> None:
    with pytest.raises(TrimRefused, match="has no checkpoint yet"):
        plan_trim(run.client, run.run, {})
    foreign = {PolicyVersion(2, 9): Path("2.9")}
    with pytest.raises(TrimRefused, match=r"version 1\.2 is not an ancestor"):
        plan_trim(run.client, run.run, foreign, PolicyVersion(1, 2))
