"""A paused run in the state, the views, the rates and Prometheus."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from synthetic_run import START, trainer_metric

from pipelines.inspect.metrics_file import LAG
from pipelines.inspect.run_folders import laminar_command
from pipelines.inspect.run_state.events import Tick
from pipelines.inspect.run_state.rates import rates, seconds_left
from pipelines.inspect.run_state.state import RunState, fold, fold_all, new_run
from pipelines.inspect.run_state.waiting import waiting_for
from pipelines.present.report.trackers import INTERNAL
from pipelines.present.view.exposition import RunCollector
from pipelines.present.view.live import LiveView
from pipelines.present.view.panels import fact_lines
from pipelines.present.view.state_json import state_to_json
from pipelines.present.view.text import eta, run_line
from schemas.records import Metric
from schemas.topics import PAUSE

SINCE = 1_777_888_800_000
PAUSED = Metric(PAUSE, 1, {"paused": 1.0, "since": float(SINCE), "running": 3.0, "waiting": 5.0}, START)
CONTINUED = Metric(PAUSE, 2, {"paused": 0.0}, START)
RUNNING = fold_all(new_run("r", 80, START), [trainer_metric(step) for step in range(1, 7)])


def scraped(state: RunState) -> str:
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: state))
    return generate_latest(registry).decode()


def test_views_name_the_pause_and_its_begin() -> None:
    state = fold(replace(RUNNING, folder=Path("runs/r")), PAUSED)
    text = "since 2026-05-04 10:00:00 UTC, 3 trajectories are running, 5 of a begun prompt wait"
    assert f"paused {text}" in run_line(state)
    assert dict(fact_lines(state))["paused"] == text
    assert state_to_json(state)["paused_since"] == SINCE
    assert waiting_for(state) == f"the end of its pause: `{laminar_command()} runs unpause --run r`"
    assert 'laminar_paused{run="r"} 1.0' in scraped(state)


def test_views_do_not_name_a_pause_that_has_ended() -> None:
    state = fold_all(RUNNING, [PAUSED, CONTINUED])
    assert "paused" not in run_line(state)
    assert state_to_json(state)["paused_since"] is None
    assert 'laminar_paused{run="r"} 0.0' in scraped(state)
    assert "laminar_paused" not in scraped(RUNNING)


def test_rates_leave_the_pause_out() -> None:
    assert rates(RUNNING).steps is not None
    assert seconds_left(RUNNING) is not None
    paused = fold(RUNNING, PAUSED)
    assert seconds_left(paused) is None
    assert eta(paused) == "ETA -"
    continued = fold_all(paused, [CONTINUED, trainer_metric(7), trainer_metric(8)])
    assert rates(continued).steps is None  # two steps since the pause give no rate
    assert rates(fold_all(continued, map(trainer_metric, range(9, 13)))).steps == rates(RUNNING).steps


def test_live_view_shows_a_pause_at_once() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=200), "r", clock=lambda: 0.0) as view:
        view.update(RUNNING)
        view.update(fold(RUNNING, Tick(START + 90_000)))
        assert out.getvalue().count("steps") == 1
        view.update(fold(RUNNING, PAUSED))
        assert "paused since" in out.getvalue()


def test_trackers_do_not_get_pauses() -> None:
    assert {PAUSE, LAG} <= INTERNAL
