"""Step metrics: Beam's counters and times of named steps, and the same totals in the liveness file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import apache_beam as beam
import pytest
from decisions import moved, placed

from infra.runners.liveness import LIVENESS
from infra.runners.step_metrics import phase
from operators.io.elements import Checkpoint, PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.fold_records import FoldRecords, close_folds
from operators.io.repartition import Placed, RepartitionTrajectories
from schemas.records import TrajectoryClosed

RECORD = ReceivedRecord("progress", 0, 3, TrajectoryClosed("p0.0"))
STARTED = Restored("g", 1, (), {}, {})
POLLED = Polled("g", 1, (RECORD, RECORD), (), {}, True)


class Deciding:
    def restore(self, restored: Restored) -> Deciding:
        return self

    def fold(self, polled: Polled) -> Sequence[object]:
        with phase("decide"):
            return [placed(1, 0), placed(2, 1, tokens=2), moved("p3.0", "p4.0")]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    LIVENESS.clear()
    yield
    close_folds()
    LIVENESS.clear()


def run(*phases: str) -> dict[str, int]:
    pipeline = beam.Pipeline(runner="FnApiRunner")
    elements = pipeline | beam.Create([STARTED, POLLED], reshuffle=False)
    elements | "decide" >> FoldRecords(Deciding(), *phases) | "repartition" >> RepartitionTrajectories()  # type: ignore
    found = pipeline.run().metrics().query()
    counters = {each.key.metric.name: each.committed for each in found["counters"]}
    return counters | {each.key.metric.name: each.committed.count for each in found["distributions"]}


def test_steps_count_records_decisions_and_phases_in_beam() -> None:
    expected = {"read_progress": 2, "placed_dispatch": 1, "placed_resume": 1, "moved_repack": 2, "decide_us": 1}
    assert run("decide") == expected


def test_liveness_report_has_the_same_counters() -> None:
    counters = run("decide")
    reported = LIVENESS.report()["counters"]
    assert {name: total for name, total in reported.items() if not name.endswith("_us")} == {
        name: total for name, total in counters.items() if not name.endswith("_us")
    }
    assert "decide_us" in reported


def test_phase_that_the_graph_does_not_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="phase 'decide' is not in the graph: FoldRecords names other"):
        run("other")


def test_phase_outside_a_pipeline_does_nothing() -> None:
    assert isinstance(Deciding().fold(POLLED)[0], Placed)
    assert "decide_us" not in LIVENESS.report()["counters"]
