"""The state of a run of this machine: its times from state.json, which its topics do not have."""

from __future__ import annotations

from dataclasses import replace

from pipelines.inspect.run_folders import RunFolder
from pipelines.inspect.run_state.events import PhaseStarted
from pipelines.inspect.run_state.state import RunState, fold, new_run


def started_run(run: RunFolder) -> RunState:
    """Return the initial state of `run`."""
    started = new_run(run.run, run.goal, int(1000 * run.started_at), run.warn_steps, run.folder)
    return replace(started, down_ms=int(1000 * run.downtime_s))


def in_phase(state: RunState, run: RunFolder) -> RunState:
    """Return `state` in the phase in which `run` is: no topic has it."""
    phase, phases = run.state.get("phase"), run.state.get("phases") or {}
    if not phase:
        return state
    return fold(state, PhaseStarted(phase, int(1000 * (run.started_at + sum(phases.values())))))


def stopped_run(state: RunState, run: RunFolder) -> RunState:
    """Return `state` at the end of `run`; of a killed run, at its newest metric."""
    ended = int(1000 * (run.state.get("ended_at") or 0)) or max(state.last_metric_at.values(), default=state.now)
    return replace(fold(state, PhaseStarted(run.status, ended)), now=ended)
