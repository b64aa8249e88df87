"""What a run waits for, from a snapshot of its state."""

from __future__ import annotations

from pipelines.inspect.run_state.errors import error_counts
from pipelines.inspect.run_state.state import RunState

QUIET_S = 30.0
"""Without an optimizer step for this time, a training run names what it waits for."""
_OF_PHASE = {
    "broker": "Kafka, and the checks of the configuration",
    "warm start": "the warm start",
    "draining": "the last commits of the roles",
    "audit": "the audit of the log",
}


def waiting_for(state: RunState) -> str | None:
    """What the run waits for; None while its optimizer steps arrive."""
    phase = state.phase.replace("_", " ")
    if phase in _OF_PHASE:
        return _OF_PHASE[phase]
    if phase == "final evaluation":
        return f"answers to held-out questions under version {state.version or '-'}"
    if state.pace and (state.now - state.pace[-1].at) / 1000 < QUIET_S:
        return None
    return _before_a_step(state)


def _before_a_step(state: RunState) -> str:
    """The first thing that is missing on the way from the roles to an optimizer step."""
    absent = [name for name, role in state.roles.items() if role.status in ("starting", "down")]
    if absent:
        return f"the start of {', '.join(absent[:3])}" + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
    if not state.roles:
        return "the roles"
    live = [each for each in state.replicas.values() if each.state != "stopped"]
    if not live:
        return "the first heartbeat of a replica"
    if not any(each.state in ("running", "draining") for each in live):
        return "a replica that has loaded weights"
    running, counts = sum(each.running for each in live), error_counts(state.score)
    work = f"{running} trajectories are running"
    if not counts.trajectories:
        return f"the first scored trajectory: {work}" if running else "the first prompt at a replica"
    if not state.step:
        return f"the first optimizer step: {counts.trajectories} trajectories are scored, {work}"
    return f"the next optimizer step: {counts.trajectories} trajectories are scored, {work}"
