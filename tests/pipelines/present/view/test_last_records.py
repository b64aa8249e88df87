"""The last heartbeats of a run's replicas are read, although they arrive when their processes have ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from synthetic_run import START, heartbeat

from pipelines.inspect.metrics_file import MetricsFile, read_metrics
from pipelines.inspect.run_state.state import new_run
from pipelines.present.report.series import tokens_generated
from pipelines.present.view.watch import Watch


class LateSource:
    """A source whose last records arrive with the third poll; it looks for them when it is asked to."""

    def __init__(self) -> None:
        stopped = replace(heartbeat(0, START + 200, 900), state="stopped")
        self._polls: list[list[Any]] = [[heartbeat(0, START, 5)], [], [stopped]]
        self._expected = False
        self.inbox_lag: dict[int, int] = {}

    def poll(self) -> list[Any]:
        return self._polls.pop(0)

    def expect_all(self) -> None:
        self._expected = True

    def caught_up(self) -> bool:
        return not (self._expected and self._polls)

    def positions(self) -> dict[str, float]:
        return {}

    def lag(self) -> dict[str, int]:
        return {}


def test_watch_reads_the_last_heartbeats_at_the_end(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        watch = Watch(new_run("sums", 80, START), source=LateSource(), file=file, now=lambda: START)  # type: ignore[arg-type]
        watch.tick()
        watch.read_to_end(60.0)
    assert tokens_generated(read_metrics(tmp_path / "metrics.jsonl")) == 900
