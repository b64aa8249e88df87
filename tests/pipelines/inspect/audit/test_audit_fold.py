"""Every outcome that the audit counts, and every fault that it finds, as tables."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from audit_records import assignment, experience, manifest, micro_batch, prompt, settled, trajectory

from pipelines.inspect.audit.fold import AuditFold
from pipelines.inspect.audit.result import Audit, ReachedStage
from pipelines.inspect.audit.trim_points import TrimmedHistory
from schemas.identity import parse_trajectory_id as key
from schemas.records import PolicyVersion

ASSIGNED = assignment("p1.0")
SCORED = (experience("p1.0"), trajectory("p1.0"), ASSIGNED)
BATCHED = (settled("p1.0", batch=3), micro_batch(3, "p1.0"), *SCORED)


def folded(*rows: object, consumed: bool = True, trimmed: tuple[str, ...] = ()) -> Audit:
    fold = AuditFold(trimmed)
    add: dict[str, Callable[..., None]] = {
        "WeightVersion": fold.manifest,
        "Settled": fold.settled,
        "MicroBatch": fold.batch,
        "Assignment": lambda row: fold.assignment(key(row.trajectory_id)),
        "Experience": lambda row: fold.experience(key(row.trajectory.trajectory_id), consumed=consumed),
        "Trajectory": lambda row: fold.trajectory(key(row.trajectory_id), consumed=consumed),
        "Prompt": lambda row: fold.prompt(row, consumed=consumed),
    }
    for row in sorted(rows, key=lambda row: ORDER.index(type(row).__name__)):
        add[type(row).__name__](row)
    return fold.audit(name_in_flight=True)


ORDER = ("WeightVersion", "Settled", "MicroBatch", "Experience", "Trajectory", "Assignment", "Prompt")


@pytest.mark.parametrize(
    ("rows", "consumed", "number"),
    [
        ((manifest("1.1", None, 3), *BATCHED), True, "trained"),
        ((manifest("1.1", None, 3), manifest("1.2", "1.1"), *BATCHED), True, "trained"),
        ((replace(manifest("1.1", None, 3), untrained_batches=(3,)), *BATCHED), True, "untrained"),
        (
            (replace(manifest("1.1", None, 3), untrained_batches=(3,)), manifest("1.2", "1.1", 4), *BATCHED),
            True,
            "untrained",
        ),
        ((settled("p1.0", "dropped", "too old"), *SCORED), True, "dropped"),
        ((settled("p1.0", "failed", "engine"), *SCORED), True, "failed"),
        ((settled("e1.0", "evaluated"), experience("e1.0"), trajectory("e1.0"), assignment("e1.0")), True, "evaluated"),
        ((settled("p1.0", "imported"),), True, "imported"),
        ((ASSIGNED,), True, "in_flight"),
        ((trajectory("p1.0"), ASSIGNED), False, "in_flight"),
        (SCORED, False, "in_flight"),
        (BATCHED, True, "in_flight"),
        ((manifest("1.1", None, 2), *BATCHED), True, "in_flight"),
        # An orphaned version: the newest version has another parent.
        ((manifest("1.0", None), manifest("1.1", "1.0", 3), manifest("2.1", "1.0", 2), *BATCHED), True, "in_flight"),
    ],
)
def test_audit_fold_counts_each_outcome(rows: tuple[object, ...], consumed: bool, number: str) -> None:
    audit = folded(*rows, consumed=consumed)
    assert audit.passed
    assert audit.numbers()[number] == 1
    assert audit.accounted == 1


@pytest.mark.parametrize(
    ("rows", "stage"),
    [
        ((trajectory("p1.0"), ASSIGNED), "score"),
        (SCORED, "experience"),
        ((experience("e1.0"), trajectory("e1.0"), assignment("e1.0")), "evaluation"),
        ((settled("p1.0", batch=3), *SCORED), "experience"),
        ((settled("p1.0", batch=3), micro_batch(3, "p2.0"), *SCORED), "experience"),
        ((settled("p1.0", batch=3), micro_batch(4, "p1.0"), *SCORED), "experience"),
        ((manifest("1.1", None, 4), *BATCHED), "training"),
    ],
)
def test_audit_fold_finds_lost_trajectories(rows: tuple[object, ...], stage: str) -> None:
    audit = folded(*rows)
    names = {row.trajectory_id for row in rows if hasattr(row, "trajectory_id") and not hasattr(row, "reason")}
    assert audit.lost == tuple(ReachedStage(name, stage) for name in sorted(names))
    assert audit.accounted == audit.dispatched + audit.undispatched
    assert not audit.passed


@pytest.mark.parametrize(
    ("rows", "trimmed"),
    [
        ((trajectory("p1.0"), ASSIGNED), "experiences"),
        (SCORED, "settled"),
        ((settled("p1.0", batch=3), *SCORED), "batches"),
        ((manifest("1.2", "1.1", 9), *BATCHED), "relay"),
    ],
)
def test_audit_fold_counts_expired_trajectories(rows: tuple[object, ...], trimmed: str) -> None:
    audit = folded(*rows, trimmed=(trimmed,))
    assert audit.passed
    assert audit.numbers()["expired"] == 1


@pytest.mark.parametrize(
    "rows",
    [
        (manifest("1.1", None, 3, 4), micro_batch(4, "p1.0"), *BATCHED),
        (manifest("1.1", None, 3), micro_batch(3, "p1.0"), *BATCHED),
        (manifest("1.1", None, 3), micro_batch(3, "p2.0", "p1.0", "p2.0"), settled("p2.0", batch=3), ASSIGNED),
        (manifest("1.1", None, 3), manifest("1.2", "1.1", 3), *BATCHED),
    ],
)
def test_audit_fold_names_trajectories_trained_twice(rows: tuple[object, ...]) -> None:
    audit = folded(*rows)
    assert len(audit.trained_twice) == 1
    assert audit.trained_twice[0] in ("p1.0", "p2.0")
    assert not audit.passed


def test_audit_fold_ignores_batches_of_an_orphaned_version() -> None:
    line = (manifest("1.0", None), manifest("1.1", "1.0", 4), manifest("2.1", "1.0", 3))
    audit = folded(*line, micro_batch(4, "p1.0"), *BATCHED)
    assert audit.trained == 1
    assert audit.trained_twice == ()


@pytest.mark.parametrize("reason", ["", "  "])
def test_audit_fold_names_drops_without_a_reason(reason: str) -> None:
    audit = folded(settled("p1.0", "dropped", reason), *SCORED)
    assert audit.without_reason == ("p1.0",)
    assert not audit.passed


def test_audit_fold_names_contradictions() -> None:
    audit = folded(manifest("1.1", None, 3), settled("p1.0", "dropped", "old"), micro_batch(3, "p1.0"), *SCORED)
    assert audit.contradictions == ("p1.0",)
    assert not audit.passed


def test_audit_fold_ignores_repeated_records() -> None:
    repeats = (trajectory("p1.0"), ASSIGNED, settled("p1.0", "dropped", "again"))
    audit = folded(manifest("1.1", None, 3), *BATCHED, *repeats)
    assert audit.passed
    assert audit.trained == audit.dispatched == 1
    assert audit.duplicate_finishes == 1
    assert audit.settled_again == 1


def test_audit_fold_counts_a_hand_over_as_one_dispatch() -> None:
    handed_over = replace(ASSIGNED, lease=2, replica=1)
    active = folded(ASSIGNED, handed_over)
    assert (active.passed, active.dispatched, active.in_flight) == (True, 1, {"generation": 1})
    ended = folded(manifest("1.1", None, 3), *BATCHED, handed_over)
    assert (ended.passed, ended.dispatched, ended.trained, ended.duplicate_finishes) == (True, 1, 1, 0)


def test_audit_fold_finds_prompts_that_were_never_dispatched() -> None:
    rows = (prompt("train", 0, 0), prompt("train", 1, 2), assignment("p1.0"), settled("e0.0", "failed", "too large"))
    lost = folded(*rows, prompt("evaluation", 0, 2))
    assert lost.lost == (ReachedStage("e0.1", "placement"), ReachedStage("p1.1", "placement"))
    assert not lost.passed
    assert lost.accounted == lost.dispatched + lost.undispatched
    assert folded(*rows, prompt("train", 2), consumed=False).lost == ()
    trimmed = folded(*rows, trimmed=("inbox",))
    assert (trimmed.expired, trimmed.lost) == (1, ())


def test_audit_fold_ignores_prompts_that_placement_rejects() -> None:
    audit = folded(prompt("train", 0, 1), assignment("p0.0"), prompt("train", 10**12), prompt("imported", 1))
    assert (audit.lost, audit.undecodable) == ((), 2)
    fold = AuditFold()
    fold.prompt(prompt("train", 0), consumed=True)
    fold.settled(settled(f"p{10**12}.0", "dropped", "of another program"))
    assert fold.closed_below(0)["train"] == 0


def test_audit_fold_finds_holes_in_prompt_numbers() -> None:
    rows = (assignment("p0.0"), prompt("train", 0, 1), prompt("train", 4), settled("p2.1", "failed", "too large"))
    lost = folded(*rows, prompt("evaluation", 2), prompt("train", 1), consumed=False)  # the topic may be out of order
    assert lost.lost == (
        ReachedStage("e0.0", "evaluation"),
        ReachedStage("e1.0", "evaluation"),
        ReachedStage("p3.0", "prompts"),
    )
    assert not lost.passed
    assert lost.accounted == lost.dispatched + lost.undispatched
    assert folded(*rows[:2], prompt("train", 5), consumed=False, trimmed=("prompts",)).numbers()["lost"] == 4
    assert folded(prompt("train", 5), consumed=False, trimmed=("prompts",)).lost == ()


def test_audit_fold_counts_no_hole_before_a_foreign_prompt() -> None:
    fold = AuditFold(written={"train": 2})
    for number in (0, 5000, 1, 2):  # prompts has committed 2 since
        fold.prompt(prompt("train", number, 0), consumed=True)
    audit = fold.audit()
    assert (audit.lost, audit.undecodable) == ((), 1)


def test_audit_fold_begins_after_a_trim_at_any_prompt() -> None:
    fold = AuditFold(before=TrimmedHistory(PolicyVersion(1, 3), 2, {"train": 4}))
    for number in (7, 9):
        fold.prompt(prompt("train", number), consumed=False)
    assert fold.audit().lost == (ReachedStage("p8.0", "prompts"),)


def test_audit_fold_uses_the_first_finished_record() -> None:
    fold = AuditFold()
    fold.trajectory(key("p1.0"), consumed=False)
    fold.trajectory(key("p1.0"), consumed=True)
    assert fold.audit().lost == ()


def test_audit_fold_names_trajectories_in_flight() -> None:
    audit = folded(
        ASSIGNED, trajectory("p0.7"), assignment("p0.7"), assignment("p0.8"), experience("e3.1"), consumed=False
    )
    assert audit.still_in_flight == (
        ReachedStage("p0.7", "score"),
        ReachedStage("p0.8", "generation"),
        ReachedStage("p1.0", "generation"),
        ReachedStage("e3.1", "evaluation"),
    )
    assert audit.undispatched == 1


def test_audit_fold_preserves_large_identities() -> None:
    names = ["p0.0", "e0.0", "p0.999999", f"e{10**18 - 1}.999999", f"p{10**18 - 1}.0"]
    audit = folded(*map(assignment, names))
    assert {each.trajectory_id for each in audit.still_in_flight} == set(names)


def test_audit_fold_memory_is_bounded_per_trajectory() -> None:
    thousand = 1000  # measured on fewer and scaled: a million would take a minute
    fold = AuditFold()
    tracemalloc.start()
    try:
        for number in range(20 * thousand):
            fold.settled(settled(f"p{number}.0", batch=number // 8))
            fold.batch(micro_batch(number // 8, f"p{number}.0"))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / 20 / thousand < 300  # bytes each: 300 MB a million
    assert fold.audit().in_flight == {"training": 20 * thousand}
