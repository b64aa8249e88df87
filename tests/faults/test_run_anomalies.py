"""The checker of runs names each anomaly in a log, and none in a clean log; it decodes every golden file."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from faults.run_anomalies import run_anomalies
from faults.wire import GOLDEN, rows_of

Rows = dict[tuple[str, str], list[tuple[int, int, dict[str, Any]]]]


class WrittenLog:
    """Rows of a log, written by a test."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def rows(self, short_name: str, kind: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
        yield from self._rows.get((short_name, kind), [])

    def committed(self) -> set[tuple[str, int]]:
        return {(f"{short_name}:0", offset) for (short_name, _), rows in self._rows.items() for _, offset, _ in rows}


def prompt(number: int, prefix: str = "", purpose: str = "train") -> dict[str, Any]:
    return {f"{prefix}number": number, f"{prefix}purpose": purpose, f"{prefix}samples": 1}


def clean() -> Rows:
    """Two training prompts and an evaluation one, each answered once; the training ones are batch 0 of one shard."""
    train = [prompt(0), prompt(1)]
    evaluation = prompt(0, purpose="evaluation")
    every = [*train, evaluation]
    nested = [{f"prompt.{k}": v for k, v in each.items()} for each in every]
    scored = [{f"trajectory.prompt.{k}": v for k, v in each.items()} | {"trajectory.member": 0} for each in every]
    settled = [{"trajectory_id": name, "outcome": "batched"} for name in ("p0.0", "p1.0")]
    version = {"epoch": 1, "number": 1}
    return {
        ("prompts", "Prompt"): [(0, n, each) for n, each in enumerate(train)],
        ("eval-prompts", "Prompt"): [(0, 0, evaluation)],
        ("inbox", "Assignment"): [(0, n, each | {"member": 0, "lease": n}) for n, each in enumerate(nested)],
        ("trajectories", "Trajectory"): [
            (0, n, each | {"member": 0, "lease": n, "finish_reason": "stop"}) for n, each in enumerate(nested)
        ],
        ("experiences", "Experience"): [(0, n, each) for n, each in enumerate(scored)],
        ("settled", "Settled"): [(0, n, each) for n, each in enumerate(settled)]
        + [(0, 2, {"trajectory_id": "e0.0", "outcome": "evaluated"})],
        ("batches", "MicroBatch"): [
            (0, n, {"batch": 0, "index": n, "count": 2, "trajectory_ids": [f"p{n}.0"]}) for n in range(2)
        ],
        ("relay", "WeightVersion"): [(0, 0, {"version": version, "parent": None, "batches": [0]})],
        ("metrics", "Metric"): [(0, 0, {"name": "trainer", "step": 1}), (0, 1, agents(1)), (0, 2, agents(3))],
        ("scaling", "ScalingDecision"): [(0, n, {"number": n, "before": n, "target": n + 1}) for n in (1, 2)],
        ("scaling", "ScalingOutcome"): [(0, 3, {"number": 2, "error": ""})],
        ("restore", "CommitNote"): [(0, 0, note(1, 1, 0)), (0, 1, note(1, 3, 1)), (0, 2, note(2, 1, 1))],
    }


def agents(episodes: int) -> dict[str, Any]:
    return {"name": "agents", "step": 0, "values": {"episodes": float(episodes)}}


def note(start: int, commit: int, offset: int, written: int = 0) -> dict[str, Any]:
    fields = [start, {}, {}, {"inbox:0": offset}, commit, {"experiences:0": written}]
    return {"group": "laminar.run.agents.0", "note": json.dumps(fields)}


def found(rows: Rows) -> list[str]:
    return run_anomalies(WrittenLog(rows), lambda role, short_name, partition: 99, 1, after=2)  # type: ignore[arg-type]


def without(short_name: str, kind: str, index: int) -> Callable[[Rows], None]:
    return lambda rows: rows[short_name, kind].pop(index) and None


def twice(short_name: str, kind: str, index: int) -> Callable[[Rows], None]:
    return lambda rows: rows[short_name, kind].append(deepcopy(rows[short_name, kind][index]))


def added(row: dict[str, Any]) -> Callable[[Rows], None]:
    return lambda rows: rows["restore", "CommitNote"].append((0, 9, row))


def unanswered(rows: Rows) -> None:
    """Trajectory p0.0 was assigned, and two later ones have ended."""
    del rows["trajectories", "Trajectory"][0]
    del rows["settled", "Settled"][0]


def under_another_lease(rows: Rows) -> None:
    rows["trajectories", "Trajectory"][1][2]["lease"] = 7


def trained(batch: int) -> Callable[[Rows], None]:
    return lambda rows: rows["relay", "WeightVersion"][0][2]["batches"].append(batch)


def test_checker_finds_nothing_in_a_clean_log() -> None:
    assert found(clean()) == []


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (without("prompts", "Prompt", 0), "lost write: prompts: 0"),
        (twice("prompts", "Prompt", 0), "duplicate: prompts: 0"),
        (without("inbox", "Assignment", 1), "lost write: placement: p1.0"),
        (twice("inbox", "Assignment", 1), "duplicate: placement gave lease 1 2 times"),
        (unanswered, "lost write: rollout: p0.0"),
        (twice("trajectories", "Trajectory", 1), "duplicate: rollout ended lease 1 of p1.0 2 times"),
        (under_another_lease, "aborted read (G1a): rollout: p1.0, lease 7"),
        (without("experiences", "Experience", 1), "lost write: score: p1.0"),
        (twice("experiences", "Experience", 1), "duplicate: score: p1.0"),
        (without("settled", "Settled", 1), "lost write: experience: p1.0"),
        (twice("settled", "Settled", 1), "duplicate: experience: p1.0"),
        (without("batches", "MicroBatch", 1), "lost write: experience (batches): p1.0"),
        (without("batches", "MicroBatch", 0), "torn transaction: experience wrote parts [1] of batch 0 to 0"),
        (without("relay", "WeightVersion", 0), "lost write: trainer: 0"),
        (without("metrics", "Metric", 0), "lost write: trainer (metrics): 1"),
        (without("settled", "Settled", 2), "lost write: evaluation: e0.0"),
        (without("scaling", "ScalingDecision", 0), "lost write: autoscaler: 1"),
        (twice("scaling", "ScalingDecision", 1), "duplicate: autoscaler: 2"),
        (twice("scaling", "ScalingOutcome", 0), "duplicate: autoscaler: the outcome of 2"),
        (without("prompts", "Prompt", 1), "aborted read (G1a): placement: p1.0"),
        (without("trajectories", "Trajectory", 1), "aborted read (G1a): score: p1.0"),
        (without("experiences", "Experience", 1), "aborted read (G1a): experience: p1.0"),
        (without("experiences", "Experience", 2), "aborted read (G1a): experience: e0.0"),
        (trained(7), "aborted read (G1a): trainer: 7"),
        (without("trajectories", "Trajectory", 0), "duplicate: gateway counted [1.0, 3.0] episodes, 2 have finished"),
        (twice("metrics", "Metric", 1), "duplicate: gateway counted [1.0, 3.0, 1.0] episodes, 3 have finished"),
        (twice("restore", "CommitNote", 2), "lost write: agents.0: start 2, commit 1 follows 2, 1"),
        (added(note(4, 1, 1)), "lost write: agents.0: start 4, commit 1 follows 2, 1"),
        (added(note(2, 2, 0)), "duplicate: agents.0: the offsets of ['inbox:0'] decrease after start 2, commit 1"),
        (
            added(note(2, 2, 1, written=9)),
            "torn transaction: laminar.run.agents.0: experiences:0 has no committed record at 9",
        ),
    ],
)
def test_checker_names_the_anomaly_of_a_role(harm: Callable[[Rows], None], line: str) -> None:
    rows = clean()
    harm(rows)
    assert line in found(rows)


def test_checker_ignores_records_after_committed_offsets() -> None:
    rows = clean()
    del rows["inbox", "Assignment"][1]
    lines = run_anomalies(WrittenLog(rows), lambda role, short_name, partition: 1, 1)  # type: ignore[arg-type]
    assert not [line for line in lines if "placement" in line]


@pytest.mark.parametrize("after", [None, 3])
def test_checker_ignores_trajectories_under_way(after: int | None) -> None:
    rows = clean()
    unanswered(rows)
    lines = run_anomalies(WrittenLog(rows), lambda role, short_name, partition: 99, 1, after)  # type: ignore[arg-type]
    assert "lost write: rollout: p0.0" not in lines


def test_checker_counts_a_batch_once_per_line_of_descent() -> None:
    rows = clean()
    again = {"version": {"epoch": 2, "number": 1}, "parent": None, "batches": [0]}
    rows["relay", "WeightVersion"].append((0, 1, again))
    assert found(rows) == []
    again["parent"] = {"epoch": 1, "number": 1}
    assert found(rows) == ["duplicate: trainer: 0"]


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda file: file.stem)
def test_wire_decodes_every_golden_file(file: Path) -> None:
    golden = json.loads(file.read_text())
    headers = {name: value.encode() for name, value in golden["headers"].items()}
    name, rows = rows_of(base64.b64decode(golden["value"]), headers)
    assert name == golden["schema"].partition("/")[0]
    assert rows
