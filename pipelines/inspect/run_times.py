"""The times of a run: the seconds of its phases, and those in which it did not run, between an end and a resumption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_RUNNING = "not running"
"""The entry of the time between the ends of a run and its resumptions, among its phases."""

PhaseSeconds = Mapping[str, float]


def phases_at_resume(state: Mapping[str, Any], alive_at: float, now: float) -> dict[str, float]:
    """Return the seconds of each phase, of a run with state.json `state` that resumes at `now`.

    They add up to the time since its start. A killed run has not recorded its last phase, which ended at `alive_at`,
    when it last wrote a file. All times are Unix seconds.
    """
    phases = {name: float(seconds) for name, seconds in (state.get("phases") or {}).items()}
    ended = state.get("ended_at")
    if ended is None:
        ended, last = min(alive_at, now), state.get("phase") or "starting"
        began = state["started_at"] + sum(phases.values())
        phases[last] = phases.get(last, 0.0) + max(0.0, ended - began)
    phases[NOT_RUNNING] = phases.get(NOT_RUNNING, 0.0) + max(0.0, now - ended)
    return phases


def downtime_s(phases: PhaseSeconds | None) -> float:
    """Return the seconds in which a run with `phases` did not run."""
    return float((phases or {}).get(NOT_RUNNING, 0.0))
