"""The state of a run of this machine: its times from state.json, which its topics do not have."""

from __future__ import annotations

from dataclasses import replace

from pipelines.inspect.run_folders import RunFolder
from pipelines.inspect.run_state.events import PhaseStarted, RoleState, RoleStatus
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


def submitted_roles(run: RunFolder) -> dict[str, RoleState]:
    """Return the roles that were submitted on this machine, by name; those of `laminar run` are its supervisor's.

    `starting`: it reads its state back, or its process is about to be started again. `down`: it failed or was killed.
    """
    if run.supervised:
        return {}
    from infra.runners.liveness import read_liveness, working_pid
    from pipelines.roles import liveness_file

    def status(name: str, recorded: str) -> RoleStatus:
        if recorded in ("up", "unsupervised"):
            report = read_liveness(liveness_file(run.folder, name))
            return "up" if report and report["ready"] and working_pid(report) else "starting"
        return "down" if recorded in ("failed", "died") else "ended"

    return {
        name: RoleState(role.get("pid"), role.get("restarts", 0), status(name, role["status"]))
        for name, role in (run.state.get("roles") or {}).items()
    }
