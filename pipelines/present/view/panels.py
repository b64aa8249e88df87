"""The parts of the live view: pure functions from a run's state to Rich renderables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.inspect.run_state.busy import busy_text
from pipelines.inspect.run_state.errors import refused_text, score_errors_text
from pipelines.inspect.run_state.events import RoleState
from pipelines.inspect.run_state.rates import progress, rates
from pipelines.inspect.run_state.state import RunState
from pipelines.inspect.run_state.waiting import waiting_for, warnings_of
from pipelines.present.plots import Points, binned
from pipelines.present.view.text import (
    UNKNOWN,
    clock,
    count,
    eta,
    figure,
    figures,
    lag_text,
    last_step_text,
    newest_accuracies,
    paused_text,
    percent,
    phase_name,
    staleness_text,
    steps_text,
    unmeasured_text,
    with_downtime,
)

LABEL_WIDTH = 11
PLOT_ROWS = 4
SILENT_S = 10.0
"""Processes without a report for this time are highlighted."""


def screen(state: RunState, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """Return the whole view in `width` columns and at most `height` rows; few rows omit the least important parts."""
    parts = [headline(state), bar(state, width), facts(state)]
    room = height - 2 - len(list(fact_lines(state)))  # below the headline, the bar and the facts
    table_rows = min(len(state.roles), 4) + 2  # a blank line and the header
    if not ascii_only and len(state.reward) >= 2 and room >= PLOT_ROWS + table_rows:
        parts.insert(2, reward_plot(state, width))
        room -= PLOT_ROWS
    if state.roles and room >= 4:
        parts += [Text(""), processes(state, room - 2)]
    elif state.replicas and room >= 4:  # the view of another machine, which knows no processes
        parts += [Text(""), replica_table(state, room - 2)]
    return Group(*parts)


def headline(state: RunState) -> RenderableType:
    """Return the run's name, its phase, and the times in the phase (none of an ended run) and in all."""
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    started = state.phases[-1].at if state.phases else state.started_at
    line.add_row(
        Text.assemble(("laminar ", "bold"), (state.run, "bold cyan")),
        Text.assemble(
            (phase_name(state.phase), "bold"),
            "" if state.now == started else f" {clock((state.now - started) / 1000)}",
            (f" · {with_downtime(state.elapsed_s, state.down_ms / 1000)} in all", "dim"),
        ),
    )
    return line


def bar(state: RunState, width: int) -> RenderableType:
    """Return the progress bar, with steps, percentage and time to completion."""
    share = progress(state)
    parts = [phase_name(state.phase)] if not state.step else [steps_text(state)]
    if share is not None:
        parts.append(percent(share))
    if state.step and (left := eta(state)):
        parts.append(left)
    text = "  ".join(parts)
    line = Table.grid(padding=(0, 2))
    room = max(10, width - len(text) - 3)
    line.add_row(
        ProgressBar(1.0, share or 0.0, width=room, complete_style="cyan", finished_style="green"),
        Text(text, no_wrap=True),
    )
    return line


def reward_plot(state: RunState, width: int) -> RenderableType:
    """Return the training reward over optimizer steps, scaled to its range."""
    points = [(point.x, point.y) for point in state.reward.points]
    low, high = min(y for _, y in points), max(y for _, y in points)
    lines = plot(points, max(10, width - LABEL_WIDTH - 8), PLOT_ROWS, low, high)
    grid = Table.grid()
    grid.add_column(min_width=LABEL_WIDTH)
    grid.add_column(width=6, justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    scale = [figure(high), *[""] * (PLOT_ROWS - 2), figure(low)]
    for mark, line in zip(scale, lines, strict=True):
        grid.add_row("", Text(f"{mark} ", "dim"), Text(line, "green"))
    return grid


def facts(state: RunState) -> RenderableType:
    """Return a line each for reward, held-out accuracy, staleness, speed and lag."""
    grid = Table.grid()
    grid.add_column(min_width=LABEL_WIDTH, no_wrap=True, style="dim")
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in fact_lines(state):
        grid.add_row(label, Text(value))
    return grid


def fact_lines(state: RunState) -> Iterable[tuple[str, str]]:
    """Yield the label and text of each line under the plot."""
    trainer, speed = state.trainer, rates(state)
    if paused := paused_text(state):
        yield "paused", paused
    mean = state.reward.recent_mean(10)
    newest, recent = figures(trainer.get("reward/mean"), mean)
    over = f", {recent} over the last {min(10, state.step)} steps" if state.step > 1 else ""
    yield "mean reward", f"{newest} now{over}"
    yield "accuracy", _held_out(state)
    buffered, dropped = state.experience.get("buffer/trajectories"), state.experience.get("dropped_stale")
    yield "staleness", f"{staleness_text(state)}   buffer {count(buffered)}   dropped {count(dropped)}"
    yield (
        "speed",
        f"{count(speed.trajectories)} trajectories/s   {count(speed.tokens_trained)} tokens/s trained with prompts   "
        f"{count(speed.tokens_generated)} tokens/s generated"
        f"{last_step_text(state) if state.whole is None else ', from the first step to the last'}",
    )
    if busy := busy_text(state.busy_shares, "the last minute") if state.whole is None else busy_text(state.whole.busy):
        yield "busy", busy
    yield "lag", lag_text(state)
    if errors := score_errors_text(state.score):
        yield "errors", errors
    if refused := refused_text(state.prompts):
        yield "refused", refused
    for warning in warnings_of(state).values():
        yield "warning", warning
    if waiting := waiting_for(state):
        yield "waits for", waiting


_HEALTH = {"up": "green", "down": "bold red", "starting": "yellow", "ended": "dim"}


def processes(state: RunState, rows: int) -> RenderableType:
    """Return a row for each process, at most `rows`; if there are more, failed and restarted processes come first."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), expand=True)
    for name, right in (("process", 0), ("pid", 1), ("state", 0), ("restarts", 1), ("last seen", 1)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    table.add_column("activity", no_wrap=True, overflow="ellipsis", ratio=1)  # of all columns only this one is cut
    roles = list(state.roles.items())
    hidden = max(0, len(roles) - rows)
    if hidden:
        roles = sorted(roles, key=lambda item: (item[1].alive, -item[1].restarts))[: rows - 1]
    for name, role in roles:
        health = Text(role.status, _HEALTH[role.status])
        age = report_age(state, name, role)
        seen = Text(UNKNOWN if age is None else f"{age:.0f} s", "yellow" if (age or 0) > SILENT_S else "")
        restarts = Text(str(role.restarts), "yellow" if role.restarts else "dim")
        table.add_row(name, str(role.pid or UNKNOWN), health, restarts, seen, activity(state, role))
    if hidden:
        table.add_row(Text(f"… and {len(state.roles) - len(roles)} more, up", "dim"))
    return table


def replica_table(state: RunState, rows: int) -> RenderableType:
    """Return a row for each replica, at most `rows`: state, version, load, KV use, tokens, and age of its heartbeat."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("replica", "state", "version", "running", "waiting", "KV", "tokens", "heartbeat"):
        table.add_column(name, justify="left" if name in ("state", "version") else "right", no_wrap=True)
    replicas = sorted(state.replicas.items())
    shown = replicas if len(replicas) <= rows else replicas[: rows - 1]
    for number, each in shown:
        kv = percent(each.kv_used / each.kv_capacity) if each.kv_capacity else UNKNOWN
        age = f"{max(0, state.now - each.sent_at) / 1000:.0f} s"
        version = str(each.policy_version or UNKNOWN)
        load = (str(each.running), str(each.waiting), kv, count(each.tokens_generated), age)
        table.add_row(str(number), each.state, version, *load)
    if len(shown) < len(replicas):
        table.add_row(f"… and {len(replicas) - len(shown)} more")
    return table


def report_age(state: RunState, name: str, role: RoleState) -> float | None:
    """Return the seconds since a process's last heartbeat, or else since its pipeline's last metrics."""
    times = [each.sent_at for each in state.replicas.values() if each.pid == role.pid]
    times += [each.sent_at for each in state.relays.values() if each.pid == role.pid]
    pipeline = name.partition("-")[0]
    if not times and pipeline in state.last_metric_at:
        times = [state.last_metric_at[pipeline]]
    return max(0.0, (state.now - max(times)) / 1000) if times else None


def activity(state: RunState, role: RoleState) -> str:
    """Return the load of a process's replicas, or the versions that its relay has."""
    parts = []
    for each in sorted(state.replicas.values(), key=lambda status: status.replica):
        if each.pid == role.pid:
            version = f"v{each.policy_version}" if each.policy_version else "no weights"
            kv = percent(each.kv_used / each.kv_capacity) if each.kv_capacity else UNKNOWN
            load = f"{each.running} running, {each.waiting} waiting, KV {kv}"
            parts.append(
                f"#{each.replica} {load}, {version}" if each.state == "running" else f"#{each.replica} {each.state}"
            )
    parts += [
        f"versions {', '.join(each.versions) or 'none'}" for each in state.relays.values() if each.pid == role.pid
    ]
    return "  ".join(parts)


def _held_out(state: RunState) -> str:
    if state.first_evaluation is None or state.evaluation is None:
        return UNKNOWN
    first = state.first_evaluation
    before = {"greedy": first.greedy, "sampled": first.sampled}
    parts = []
    for mode, last in newest_accuracies(state):
        change = f"{figure(before[mode])} → " if last.x > first.version else ""
        parts.append(f"{mode} {change}{figure(last.y)} (version {last.x:.0f})")
    parts = parts or [UNKNOWN]
    parts += [f"{state.evaluation.questions} questions"] if state.evaluation.questions else []
    return "   ".join([*parts, *filter(None, [unmeasured_text(state)])])


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row from the top, then by column
_BLANK = 0x2800


def plot(points: Points, width: int, height: int, low: float, high: float) -> list[str]:
    """Return `height` lines of `width` braille characters, each two columns of four dots: y over x, from `low` at the
    bottom to `high`, clipped."""
    rows = height * 4
    cells = [[_BLANK] * width for _ in range(height)]
    before: int | None = None
    columns = 2 * width if len(points) >= 2 else 1
    for column, value in enumerate(binned(points, columns, points[0][0], points[-1][0]) if points else ()):
        if value is None:
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        row = rows - 1 - min(rows - 1, max(0, round(share * (rows - 1))))
        for each in _between(before, row):
            cells[each // 4][column // 2] |= _DOTS[each % 4][column % 2]
        before = row
    return ["".join(map(chr, line)) for line in cells]


def _between(before: int | None, row: int) -> range:
    """Return the rows to fill in a column so that a steep line has no gaps."""
    if before is not None and before > row:
        return range(row, before)
    return range(row if before is None else min(row, before + 1), row + 1)
