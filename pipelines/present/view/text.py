"""Numbers as text for people, and a run's state in one line."""

from __future__ import annotations

import math

from pipelines.inspect.run_state.buffers import curriculum_levels, levels_text
from pipelines.inspect.run_state.curve import Point
from pipelines.inspect.run_state.errors import refused_text, score_errors_text
from pipelines.inspect.run_state.evaluation import unmeasured_rounds
from pipelines.inspect.run_state.rates import progress, rates, seconds_left
from pipelines.inspect.run_state.state import FIRST_PHASES, RunState
from pipelines.inspect.run_state.waiting import waiting_for, warnings_of
from pipelines.present.output import utc
from pipelines.roles import described
from schemas.topics import BATCHES

UNKNOWN = "-"
IDLE_MS = 60_000
"""A trainer that has trained nothing for so long, and for ten times as long as a step takes, is shown as idle."""


def clock(seconds: float | None) -> str:
    """Return a duration as `1:02:03`, or `2:03` below an hour."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def with_downtime(seconds: float | None, down_s: float | None) -> str:
    """Return the time in which a run ran, and that in which it did not, if any: `2:03 (and 1:00 not running)`."""
    return clock(seconds) + (f" (and {clock(down_s)} not running)" if down_s and down_s >= 1 else "")


def figure(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` digits after the point, two significant ones if that shows 0; a dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:.2g}" if digits and 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


def figures(*values: float | None) -> list[str]:
    """Return numbers that stand side by side, as `figure` does, with the same digits if one of them needs only two."""
    plain = any(value is not None and abs(value) >= 0.01 for value in values)
    return [f"{round(value, 2) + 0.0:.2f}" if plain and value is not None else figure(value) for value in values]


def starts_again(state: RunState) -> bool:
    """Whether the run is being resumed: its newest metrics are of the time before."""
    return bool(state.step) and phase_name(state.phase) in (*FIRST_PHASES, "warm start", "starting")


def eta(state: RunState) -> str:
    """Return the time to the goal, `ETA 1:02`, rounded up; empty during a resume, at the goal and without one."""
    if not state.goal or state.step >= state.goal or starts_again(state):
        return ""
    left = seconds_left(state)
    return f"ETA {clock(None if left is None else math.ceil(left))}"


def count(value: float | None) -> str:
    """Return a count as `950`, `9.5k` or `1.2M`; fractions below 100 keep one digit after the point."""
    if value is None:
        return UNKNOWN
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound * 0.99995:
            return f"{value / bound:.1f}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}"


def percent(share: float | None) -> str:
    """Return a share as `54 %`."""
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def phase_name(phase: str) -> str:
    """Return a phase's name without underscores."""
    return phase.replace("_", " ")


def last_step_text(state: RunState) -> str:
    """Return `, last step 0:18:03 ago` if the trainer has been idle for long; empty else."""
    if len(state.pace) < 2:
        return ""
    last_ms = state.now - state.pace[-1].at
    step_ms = (state.pace[-1].at - state.pace[0].at) / (len(state.pace) - 1)
    return f", last step {clock(last_ms / 1000)} ago" if last_ms > max(IDLE_MS, 10 * step_ms) else ""


def lag_text(state: RunState, most: int = 20) -> str:
    """Return the lagging topics, largest lag first, as `inbox 3 · trajectories 1`; `none` if no topic lags.

    Batches that were made beyond the goal are named apart.
    """
    if not state.lag:
        return UNKNOWN
    behind = sorted(((records, short_name) for short_name, records in state.open_lag.items() if records), reverse=True)
    text = " · ".join(f"{short_name} {count(records)}" for records, short_name in behind[:most]) or "none"
    beyond = state.batches_beyond_goal
    return f"{text} · {BATCHES.short_name}: {beyond_goal_text(beyond)}" if beyond else text


def beyond_goal_text(records: int) -> str:
    """Return what a lag of so many records of batches is after the last optimizer step."""
    return f"{count(records)} beyond the goal, not needed"


def staleness_text(state: RunState) -> str:
    """Return `0.8 (at most 2) in the last batch`, and how many of the run are above `experience.max_staleness`."""
    mean, most = state.trainer.get("staleness/mean"), state.trainer.get("staleness/max")
    if mean is None:
        return UNKNOWN
    over = state.experience.get("over_age")
    text = f"{figure(mean)} (at most {figure(most, 0)}) in the last batch"
    return text + (f", {figure(over, 0)} of the run above the limit" if over else "")


def steps_text(state: RunState) -> str:
    """Return `43/80 steps`, or `43 steps` for a run without a goal."""
    return f"{state.step}/{state.goal} steps" if state.goal else f"{state.step} steps"


def paused_text(state: RunState) -> str:
    """Return `since 2026-05-04 10:00:00 UTC`, and what runs and waits; empty if the run is not paused."""
    if state.paused_since is None:
        return ""
    running, waiting = int(state.pause.get("running", 0)), int(state.pause.get("waiting", 0))
    rest = f", {waiting} of a begun prompt wait" if waiting else ""
    return f"since {utc(state.paused_since)} UTC, {running} trajectories are running{rest}"


def unmeasured_text(state: RunState) -> str:
    """Return the rounds of the first and the newest evaluation that had too few answers; empty without any."""
    found = {each.version: each for each in (state.first_evaluation, state.evaluation) if each is not None}
    rounds = [text for each in found.values() for text in unmeasured_rounds(each)]
    return f"not measured: {', '.join(rounds)}" if rounds else ""


def newest_accuracies(state: RunState) -> list[tuple[str, Point]]:
    """Return the newest held-out accuracy of each mode, at the number of its version."""
    curves = (("greedy", state.greedy), ("sampled", state.sampled))
    return [(mode, curve.last) for mode, curve in curves if curve.last is not None]


def current_warnings(state: RunState) -> dict[str, str]:
    """Return the signs that the run does not learn, by name; nothing before the first update of a resume."""
    return {} if starts_again(state) else warnings_of(state)


def run_line(state: RunState) -> str:
    """Return the run's state in one line, for logs. It counts the warnings: the view prints each when it begins."""
    speed = rates(state)
    parts = [f"[{clock(state.elapsed_s)}] {phase_name(state.phase)}"]
    if paused := paused_text(state):
        parts.append(f"paused {paused}")
    again = starts_again(state)
    if state.step:
        parts.append(steps_text(state))
    if state.step and not again:
        parts.append(eta(state))
        parts.append(f"mean reward {figure(state.trainer.get('reward/mean'))}")
        if levels := curriculum_levels(state.experience):
            parts.append(f"curriculum level {levels_text(levels)}")
        parts.append(f"staleness {staleness_text(state)}")
    elif not state.step and (share := progress(state)) is not None:
        parts.append(percent(share))
        best = state.warm_start.get("accuracy/greedy")
        parts.append(f"accuracy {figure(best)}" if best is not None else "")
    if errors := score_errors_text(state.score):
        parts.append(f"errors {errors}")
    if refused := refused_text(state.prompts):
        parts.append(f"refused {refused}")
    if warnings := current_warnings(state):
        parts.append("1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings")
    if waiting := waiting_for(state):
        parts.append(f"waits for {waiting}")
    if not again:
        parts += [f"accuracy {mode} {figure(last.y)} (version {last.x:.0f})" for mode, last in newest_accuracies(state)]
    parts.append(unmeasured_text(state))
    if speed.trajectories is not None:
        parts.append(f"{count(speed.trajectories)} trajectories/s")
    if speed.tokens_generated is not None:
        parts.append(f"{count(speed.tokens_generated)} tokens/s")
    if waiting and any(state.open_lag.values()):
        parts.append(f"lag {lag_text(state, most=3)}")
    down = [name for name, role in state.roles.items() if role.status == "down"]
    if down:
        parts.append(f"down: {', '.join(map(described, down))}")
    return "  ".join(part for part in parts if part)
