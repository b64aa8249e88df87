"""The live view on a terminal and without one, and the watch that feeds it."""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import run as run_process
from typing import Any

import pytest
from rich.console import Console
from synthetic_run import START, evaluation_metric, heartbeat, history, manifest, trainer_metric

from infra.kafka.unreadable_record import UnreadableRecord
from pipelines.cli.watch import follow
from pipelines.inspect import metrics_file
from pipelines.inspect.metrics_file import POSITION, MetricsFile, by_topic, read_metrics
from pipelines.inspect.run_state.events import CheckStarted, LagMeasured, PhaseStarted, RolesChanged, RoleState, Tick
from pipelines.inspect.run_state.state import RunState, fold, fold_all, new_run
from pipelines.present.view.console import console
from pipelines.present.view.live import LiveView
from pipelines.present.view.panels import plot, screen
from pipelines.present.view.text import clock, count, figures, lag_text, run_line
from pipelines.present.view.watch import Watch
from schemas.records import Metric, RelayStatus

ROLES = {"rollout-0": RoleState(41, 1, "up"), "score": RoleState(43, 0, "up"), "trainer": RoleState(44, 0, "down")}


def training() -> RunState:
    events = [
        PhaseStarted("training", START + 1000),
        *[trainer_metric(step) for step in range(1, 41)],
        evaluation_metric(0, "greedy", 0.24),
        evaluation_metric(40, "greedy", 0.88),
        heartbeat(0, START + 65_000, 10),
        RolesChanged(ROLES),
        LagMeasured({"prompts": 0, "inbox": 12, "batches": 3}),
        RelayStatus(0, ("1.40", "1.39"), 9, "host", 43, START + 67_000),
        Tick(START + 70_000),
    ]
    return fold_all(new_run("sums", 80, START), events)


def drawn(state: RunState, width: int = 100, height: int = 30, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(state, width, height, **options))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_screen_shows_run_state() -> None:
    text = drawn(training())
    for expected in (
        "sums", "training 1:09 · 1:10 in all", "40/80 steps  50 %  ETA 0:48", "greedy 0.24 → 0.88", "version 40",
        "0.80 (at most 2) in the last batch", "107 trajectories/s", "inbox 12 · batches 3", "versions 1.40, 1.39",
        "#0 12 running, 3 waiting, KV 43 %, v1.12",
    ):  # fmt: skip
        assert expected in text, expected
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith((*ROLES,))}
    assert rows["rollout-0"][1:6] == ["41", "up", "1", "5", "s"]
    assert rows["score"][1:6] == ["43", "up", "0", "3", "s"]
    assert rows["trainer"][1:6] == ["44", "down", "0", "2", "s"]


def test_screen_of_80_columns_shows_whole_pids() -> None:
    roles = RolesChanged({"rollout-0": RoleState(4194301, 12, "up"), "score": RoleState(4194302, 0, "up")})
    beats = [heartbeat(replica, START + 65_000, 9000, pid=4194301) for replica in range(3)]
    text = drawn(fold_all(training(), [roles, *beats]), width=80)
    assert {"4194301", "4194302"} <= set(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_screen_of_unknown_run() -> None:
    text = drawn(new_run("sums", None, START))
    assert "starting" in text
    assert "None" not in text
    assert "nan" not in text


def remote(replicas: int) -> RunState:
    """A run on other machines: its replicas are known, its processes are not."""
    heartbeats = [heartbeat(number, START + 65_000, 10) for number in range(replicas)]
    return fold_all(new_run("sums", 80, START), [*heartbeats, Tick(START + 70_000)])


@pytest.mark.parametrize("height", [14, 20, 50])
def test_screen_shows_replicas_of_a_remote_run(height: int) -> None:
    lines = drawn(remote(30), 100, height).splitlines()
    assert len(lines) <= height
    rows = [line.split() for line in lines]
    assert ["0", "running", "1.12", "12", "3", "43", "%", "10", "5", "s"] in rows
    assert any("more" in line for line in lines) == (height < 50)


def test_watch_on_a_terminal_redraws_until_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.cli.watch.REFRESH_S", 0)
    states = iter([remote(1), training()])

    class Watching:
        def tick(self) -> RunState:
            for state in states:
                return state
            raise KeyboardInterrupt

    terminal = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    with pytest.raises(KeyboardInterrupt), LiveView(terminal, "sums") as view:
        follow(Watching(), view)  # type: ignore[arg-type]
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("heartbeat") < shown.rindex("40/80 steps")


@pytest.mark.parametrize("height", [10, 14, 20, 24, 40])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_screen_fits_terminal_size(width: int, height: int) -> None:
    many = {f"role-{index}": RoleState(index, 0, "up") for index in range(30)} | {"failed": RoleState(99, 3, "down")}
    state = fold(training(), RolesChanged(many))
    lines = drawn(state, width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if height >= 14:
        assert any(line.startswith("failed") for line in lines)  # failed processes are shown first
        assert any("more, up" in line for line in lines)


def test_screen_without_braille_on_ascii_terminal() -> None:
    assert any("\u2800" <= letter <= "\u28ff" for letter in drawn(training()))
    assert not any("\u2800" <= letter <= "\u28ff" for letter in drawn(training(), ascii_only=True))


def test_braille_plot() -> None:
    assert plot([(0, 0.0), (1, 1.0)], 1, 1, 0, 1) == ["⡸"]
    assert plot([(0, 1.0), (1, 1.0)], 2, 2, 0, 1) == ["⠉⠉", "⠀⠀"]
    assert plot([(0, 0.0), (1, 0.0)], 2, 1, 0, 1) == ["⣀⣀"]
    assert plot([(0, 5.0)], 2, 1, 5, 5) == ["⠂⠀"]
    assert plot([], 2, 1, 0, 1) == ["⠀⠀"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_live_view_without_terminal_prints_lines() -> None:
    out, now = io.StringIO(), Clock()
    with LiveView(Console(file=out, width=40), "sums", 80, clock=now, line_every_s=10) as view:
        state = training()
        for _ in range(160):
            now.now += 0.125
            state = fold(state, Tick(state.now + 125))
            view.update(state)
        assert len(out.getvalue().splitlines()) == 1 + 2  # the phase, then a line every 10 s
        view.note("rollout-0 was restarted")
        view.update(fold(state, PhaseStarted("final_evaluation", state.now)))
    lines = out.getvalue().splitlines()
    assert lines[0] == "-- training"
    assert lines[1] == run_line(fold(training(), Tick(START + 70_125)))  # one line at any width
    assert lines[3:5] == ["rollout-0 was restarted", "-- final evaluation"]
    assert "\x1b" not in out.getvalue()
    assert len(lines) == 6


def test_live_view_without_terminal_names_each_check_at_once() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out), "sums", 80, clock=Clock()) as view:
        state = fold(new_run("sums", 80, START), PhaseStarted("checks", START))
        for subject in ("the tokenizer", "reward mine"):
            state = fold(state, CheckStarted(subject, START))
            view.update(state)
            view.update(fold(state, Tick(START + 50)))
    lines = [line.partition("waits for ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["", "the check of the tokenizer (0 s)", "the check of reward mine (0 s)"]


def test_run_line_lists_only_failed_roles_as_down() -> None:
    roles = {"a": RoleState(None, 0, "starting"), "b": RoleState(1, 0, "up"), "c": RoleState(None, 0, "ended")}
    assert "down" not in run_line(fold(training(), RolesChanged(roles)))
    assert "down: d" in run_line(fold(training(), RolesChanged({**roles, "d": RoleState(7, 1, "down")})))


def test_live_view_shows_last_state_at_exit() -> None:
    out, now = io.StringIO(), Clock()
    with LiveView(Console(file=out, width=200), "sums", 80, clock=now) as view:
        view.update(training())
        view.update(fold(training(), trainer_metric(80)))
    assert "80/80 steps" in out.getvalue().splitlines()[-1]


def test_live_view_does_not_repeat_its_last_line_at_exit() -> None:
    out, now = io.StringIO(), Clock()
    with LiveView(Console(file=out, width=200), "sums", 80, clock=now) as view:
        state = fold(training(), RolesChanged({}))
        view.update(state)
        view.update(fold(state, Tick(state.now + 900)))  # Ctrl-C
    assert len(out.getvalue().splitlines()) == 2  # the phase and one line


def test_watch_shows_steps_that_are_trained_again_after_a_resume() -> None:
    out, now = io.StringIO(), Clock()
    console = Console(file=out, width=200)
    trained = fold_all(new_run("sums", 80, START), [trainer_metric(step) for step in (50, 51, 52)])
    later = [replace(trainer_metric(step), measured_at=trainer_metric(52).measured_at + 9000) for step in (44, 45)]
    with LiveView(console, "sums", 80, clock=now) as view:
        watch = Watch(trained, view=view, now=lambda: START)
        watch.add(trainer_metric(52))  # the observer reads it again
        assert "again" not in out.getvalue()
        for metric in later:
            watch.add(metric)
    notes = [line for line in out.getvalue().splitlines() if "again" in line]
    assert notes == [
        "the trainer continues from its newest checkpoint: it trains the recorded batches of steps 44 to 52 again",
    ]


def test_rewards_side_by_side_have_the_same_digits() -> None:
    assert figures(0.28, -0.0022) == ["0.28", "0.00"]
    assert figures(-0.0022, 0.0031) == ["-0.0022", "0.0031"]
    assert figures(None, 0.5) == ["-", "0.50"]


def test_live_view_redraws_twice_per_second() -> None:
    out, now = io.StringIO(), Clock()
    console = Console(file=out, width=100, height=30, force_terminal=True)
    with LiveView(console, "sums", 80, clock=now) as view:
        before = len(out.getvalue())
        state, redraws = training(), 0
        for _ in range(100):
            now.now += 0.125
            state = fold(state, Tick(state.now + 125))
            view.update(state)
            redraws, before = redraws + (len(out.getvalue()) > before), len(out.getvalue())
        assert redraws == 25
    assert "\x1b[?1049h" not in out.getvalue()  # no alternate screen: the output stays
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_live_view_redraw_is_cheap() -> None:
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True)
    ticks = iter(range(10**6))
    state = training()
    with LiveView(console, "sums", 80, clock=lambda: next(ticks)) as view:

        def milliseconds() -> float:
            started = time.thread_time()
            for step in range(10):
                view.update(fold(state, Tick(state.now + step)))
            return (time.thread_time() - started) / 10 * 1000

        fastest = min(milliseconds() for _ in range(5))
    assert fastest < 15  # two redraws per second: 3 % of a core


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0:00"), (61.9, "1:01"), (3600, "1:00:00"), (-3, "0:00"), (90061, "25:01:01")],
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (2.25, "2.2"), (999.0, "999"), (1000, "1.0k"), (999_960, "1.0M"),
     (12_345, "12.3k"), (2.5e9, "2.5G")],
)  # fmt: skip
def test_count(value: float | None, text: str) -> None:
    assert count(value) == text


def test_lag_text() -> None:
    assert lag_text(new_run("r", 1, 0)) == "-"
    assert lag_text(fold(new_run("r", 1, 0), LagMeasured({"inbox": 0}))) == "none"
    assert lag_text(training(), most=1) == "inbox 12"


class Source:
    """An event source with the records of four ticks."""

    def __init__(self) -> None:
        self.polls = [
            [trainer_metric(1), heartbeat(0, START, 5), heartbeat(1, START, 6)],
            [manifest(1, 0), heartbeat(0, START + 100, 7), Metric("score", 0, {"errors": 1.0}, START + 2)],
            [
                UnreadableRecord("metrics", 0, 17, "no laminar-schema header"),
                UnreadableRecord("metrics", 0, 18, "neither"),
            ],
            [],
        ]
        self.lags = 0

    def poll(self) -> list[Any]:
        return self.polls.pop(0)

    def positions(self) -> dict[str, float]:
        return {"metrics": 5.0, "relay": 1.0}

    def caught_up(self) -> bool:
        return True

    def lag(self) -> dict[str, int]:
        self.lags += 1
        return {"inbox": self.lags}

    @property
    def inbox_lag(self) -> dict[int, int]:
        return {0: self.lags}


def test_watch_folds_writes_and_shows_records(tmp_path: Path) -> None:
    now, out = Clock(), io.StringIO()
    path, source = tmp_path / "metrics.jsonl", Source()
    view = LiveView(Console(file=out), "sums", 80, clock=now)
    with view, MetricsFile(path) as file:
        state = new_run("sums", 80, START)
        watch = Watch(state, file=file, view=view, now=lambda: START + int(now.now * 1000))
        watch.start_phase("starting")
        watch.source = source
        watch.start_phase("training")
        for seconds in (1, 1, 1, -3600):  # the clock is set back
            now.now += seconds
            watch.tick(ROLES)
        state = watch.add(Metric("warm_start", 0, {"progress": 0.5}, START))
    assert (state.step, state.versions, state.warm_start) == (1, 1, {"progress": 0.5})
    assert state.roles == ROLES
    assert state.lag == {"inbox": 3}
    written = read_metrics(path)
    series = ["phase", "phase", "trainer", "replica", "replica", "lag", "position", "version", "score"]
    assert [each.name for each in written] == [*series, "unreadable", "lag", "lag", "position", "warm_start"]
    assert written[len(series)].values == {"metrics": 2}
    assert [each.step for each in written if each.name == "replica"] == [0, 1]  # not every heartbeat is written
    assert written[2] == trainer_metric(1)
    assert [list(each.values) for each in written[:2]] == [["starting"], ["training"]]
    assert "-- training" in out.getvalue()
    notes = [line for line in out.getvalue().splitlines() if "unreadable" in line]
    assert notes == ["metrics, partition 0, offset 17: unreadable record: no laminar-schema header"]


def test_live_view_of_a_run_continues_without_a_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, LiveView(console(file=pipe, discard_if_closed=True), "r", 8) as view:
        view.note("of a role's restart")
        view.note("of another")


def test_metrics_file_continues_after_torn_write(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = list(history(5))
    with MetricsFile(path) as file:
        file.append(metrics[:10])
    with path.open("ab") as torn:
        torn.write(b'{"name":"trainer","st')
    with MetricsFile(path) as file:
        file.append(metrics)  # all again, as a restarted observer reads them
        file.append([])
    assert read_metrics(path) == metrics


def test_metrics_file_reads_only_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, metrics = tmp_path / "metrics.jsonl", list(history(50))
    with MetricsFile(path) as file:
        assert (file.recent, file.position) == ([], None)
        file.append([*metrics[:-1], by_topic(POSITION, {"metrics": 7.0}, START), metrics[-1]])
    monkeypatch.setattr(metrics_file, "RECENT_BYTES", 1000)
    with MetricsFile(path) as file:
        assert file.position == {"metrics": 7.0}
        assert 2 <= len(file.recent) < 20
        assert file.recent[-1] == metrics[-1]
        file.append(metrics[-2:])
    assert [each for each in read_metrics(path) if each.name != "position"] == metrics


def test_read_metrics_is_empty_for_a_run_without_the_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_read_metrics_rejects_invalid_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"name":"trainer","step":1,"values":{},"measured_at":5}\n{"name":"trainer"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*missing"):
        read_metrics(path)


def test_view_imports_no_heavy_package() -> None:
    code = (
        "import sys, pipelines.present.view.watch; print(sorted({'apache_beam', 'torch', 'kafka'} & set(sys.modules)))"
    )
    found = run_process([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_screen_shows_draining_replica() -> None:
    state = fold(training(), replace(heartbeat(0, START + 70_000, 10), state="draining"))
    assert "#0 draining" in drawn(state)
