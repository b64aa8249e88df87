"""metrics.jsonl stays small: old samples are thinned, values of batches are all kept."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from pipelines.inspect import metrics_file
from pipelines.inspect.metrics_file import POSITION, REPLICA, MetricsFile, by_topic, read_metrics
from schemas.records import Metric
from schemas.topics import STEP_COUNTERS

MAX_BYTES = 40_000
REPLICAS, BEATS = 4, 1_000


def replica(number: int, beat: int) -> Metric:
    return Metric(REPLICA, number, {"running": 8.0, "tokens_generated": 64.0 * beat}, 2_000 * beat)


def long_run(path: Path) -> Sequence[Metric]:
    """Write the metrics of a run with a sample of each replica every 2 s and a batch every 20 s; return them."""
    written: list[Metric] = []
    with MetricsFile(path, MAX_BYTES) as file:
        for beat in range(BEATS):
            new = [replica(number, beat) for number in range(REPLICAS)]
            new += [Metric(STEP_COUNTERS + "score", 0, {"read": float(beat)}, 2_000 * beat)]
            if beat % 10 == 0:
                new += [Metric("trainer", beat // 10, {"loss": 0.5}, 2_000 * beat)]
                new += [by_topic(POSITION, {"metrics": beat}, 2_000 * beat)]
            file.append(new)
            written += new
    return written


def test_file_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = long_run(path)
    found = read_metrics(path)
    assert path.stat().st_size < 2 * MAX_BYTES < len(written) * 60
    assert [each for each in found if each.name == "trainer"] == [each for each in written if each.name == "trainer"]
    with MetricsFile(path, MAX_BYTES) as file:
        assert file.position == {"metrics": 990.0}


@pytest.mark.parametrize("number", range(REPLICAS))
def test_samples_are_thinned_evenly(tmp_path: Path, number: int) -> None:
    path = tmp_path / "metrics.jsonl"
    long_run(path)
    beats = [each.measured_at // 2_000 for each in read_metrics(path) if (each.name, each.step) == (REPLICA, number)]
    assert beats == sorted(set(beats))
    assert (beats[0], beats[-1]) == (0, BEATS - 1)
    steps = [later - earlier for earlier, later in pairwise(beats)]
    assert steps[-1] == 1, "the newest are all there"
    old = steps[: len(steps) // 4]
    assert max(old) <= 2 * min(old)


def test_samples_of_an_existing_file_are_thinned_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.append(replica(number, beat) for beat in range(BEATS) for number in range(REPLICAS))
    assert path.stat().st_size > 3 * MAX_BYTES
    with MetricsFile(path, MAX_BYTES) as file:
        file.append([replica(0, BEATS)])
    assert path.stat().st_size < MAX_BYTES


def test_values_of_batches_alone_are_not_rewritten_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thinned: list[int] = []
    monkeypatch.setattr(metrics_file, "thin_samples", lambda path, *_: thinned.append(path.stat().st_size))
    with MetricsFile(tmp_path / "metrics.jsonl", MAX_BYTES) as file:
        for step in range(2_000):
            file.append([Metric("trainer", step, {"loss": 0.5}, 2_000 * step)])
    gaps = [later - earlier for earlier, later in pairwise(thinned)]
    assert len(thinned) > 2
    assert min(gaps) > MAX_BYTES // 2


def test_full_disk_leaves_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(metrics_file, "thin_samples", fail)
    written = long_run(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics.jsonl") == written
