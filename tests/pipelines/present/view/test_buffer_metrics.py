"""What several shards of the buffer tell of a batch, as one."""

from __future__ import annotations

from pipelines.inspect.run_state.buffers import merge_shards
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.report.series import newest_by_step, staleness_histogram
from schemas.records import Metric

FIRST = {"staleness/0": 3.0, "trajectories/sums": 3.0, "reward/mean/sums": 1.0, "curriculum/level": 2.0, "shard": 0.0}
SECOND = {"staleness/0": 1.0, "staleness/1": 4.0, "trajectories/sums": 1.0, "reward/mean/sums": 0.0, "shard": 1.0}


def test_counts_add_up_and_means_are_weighted() -> None:
    assert merge_shards([FIRST, SECOND]) == {
        "staleness/0": 4.0,
        "staleness/1": 4.0,
        "trajectories/sums": 4.0,
        "reward/mean/sums": 0.75,
        "curriculum/level": 2.0,
    }
    assert merge_shards([{"dropped": 2.0}]) == {"dropped": 2.0}


def test_the_newest_word_of_each_shard_counts_for_a_step() -> None:
    told = [
        Metric("experience", 0, {"staleness/0": 9.0, "shard": 0.0}, 1),
        Metric("experience", 0, SECOND, 2),
        Metric("experience", 0, FIRST, 3),
    ]
    assert staleness_histogram(told) == {0: 4, 1: 4}
    assert [metric.values["trajectories/sums"] for metric in newest_by_step(told, "experience")] == [4.0]
    assert fold_all(new_run("r", None, 0), told).experience["trajectories/sums"] == 4.0
