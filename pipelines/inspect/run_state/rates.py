"""Rates and progress of a run, from a snapshot of its state."""

from __future__ import annotations

from pipelines.inspect.run_state.pace import WINDOW_MS, RunRates, seconds_of
from pipelines.inspect.run_state.state import RunState

RUNNING = ("running", "draining")
SAMPLE_MS = 30_000
"""A replica of which metrics.jsonl has no newer sample does not count: samples are 2 s apart."""


def rates(state: RunState) -> RunRates:
    """Training rates over the newest steps; the generation rate is the sum over live replicas' newest heartbeats.

    Of a run that has ended those of the whole run, if they are known.
    """
    if state.whole is not None:
        return state.whole.rates
    newest = {replica: beats[-1].at for replica, beats in state.beats.items() if replica not in state.replicas}
    sampled = [replica for replica, at in newest.items() if state.now - at <= SAMPLE_MS]
    running = [replica for replica, status in state.replicas.items() if status.state in RUNNING]
    speeds = [_speed(state, replica) for replica in (*running, *sampled)]
    known = [speed for speed in speeds if speed is not None]
    generated = sum(known) if known else None
    if (seconds := seconds_of(state.pace)) is None:
        return RunRates(None, None, None, generated)
    first, last = state.pace[0], state.pace[-1]
    return RunRates(
        steps=(last.step - first.step) / seconds,
        trajectories=(last.trajectories - first.trajectories) / seconds,
        tokens_trained=sum(pace.tokens for pace in state.pace[1:]) / seconds,
        tokens_generated=generated,
    )


def progress(state: RunState) -> float | None:
    """Progress towards the goal, 0 to 1; during the warm start, that of the warm start. None without a goal."""
    if state.phase.replace("_", " ") == "warm start":
        done = state.warm_start.get("progress")
        return None if done is None else min(1.0, max(0.0, done))
    return min(1.0, state.step / state.goal) if state.goal else None


def seconds_left(state: RunState) -> float | None:
    """Seconds to the goal at the rate of the newest steps; 0 at the goal; None if unknown, paused or without a goal.

    Steps that are too close for a rate, such as those that a resumed trainer makes again, give one with the time since.
    """
    if state.goal and state.step >= state.goal:
        return 0.0
    if state.goal is None or state.paused_since is not None:
        return None
    steps = rates(state).steps
    if steps is None and len(state.pace) > 1 and (since_ms := state.now - state.pace[0].at) >= WINDOW_MS:
        steps = 1000 * (state.pace[-1].step - state.pace[0].step) / since_ms
    return (state.goal - state.step) / steps if steps else None


def _speed(state: RunState, replica: int) -> float | None:
    beats = state.beats.get(replica, ())
    seconds = seconds_of(beats)
    return None if seconds is None else max(0, beats[-1].tokens - beats[0].tokens) / seconds
