"""Step metrics: one place counts for Beam, for the liveness file and for the metrics of the run."""

from __future__ import annotations

import pytest
from counting_pipeline import POLLED, Deciding, counted

from infra.runners.liveness import LIVENESS
from infra.runners.step_metrics import StepCounters, phase
from operators.io.repartition import Placed
from operators.io.write_transactionally import metric_values

DECISIONS = {"placed/dispatch": 1, "placed/resume": 1, "moved/repack": 2}

pytestmark = pytest.mark.usefixtures("clean_liveness")


def test_steps_count_records_decisions_and_phases_in_beam() -> None:
    counts = {"read/progress": 2, "time_us/decide": 1, "considered/all": 3, "held": 5}
    assert counted("decide") == {**counts, **DECISIONS}


def test_liveness_and_metrics_have_the_counters_of_beam() -> None:
    counters = counted("decide")
    del counters["time_us/decide"], counters["held"]  # Beam has a distribution and a gauge
    assert set(LIVENESS.report()["counters"]) == {"g"}
    reported = LIVENESS.counters("g")
    seconds = reported.pop("time_us/decide") / 1e6
    assert reported == counters
    values = metric_values(LIVENESS.counters("g"))
    assert values.pop("time/decide") == seconds
    assert values == counters


def test_step_counters_continue_the_totals_of_a_note() -> None:
    counters = StepCounters("g", {"trajectories": 40})
    counters.add("trajectories", 2)
    counters.add_all({"stale": 3}, "dropped")
    assert counters.totals == {"trajectories": 42, "dropped/stale": 3}
    assert LIVENESS.counters("g") == {"trajectories": 2, "dropped/stale": 3}  # of this process


def test_phase_that_the_graph_does_not_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="phase 'decide' is not in the graph: FoldRecords names other"):
        counted("other")


def test_phase_outside_a_pipeline_measures_and_counts_nothing() -> None:
    assert isinstance(Deciding().fold(POLLED)[0], Placed)
    with phase("decide") as timed:
        pass
    assert timed.seconds > 0
    assert "time_us/decide" not in LIVENESS.counters("g")
