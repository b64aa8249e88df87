"""`laminar runs list` and `status`: the runs of this machine, from their folders and, of submitted ones, from Kafka."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infra.clocks import wall_ms
from infra.counted import counted
from pipelines.cli.options import JsonOption, Printing, RunOption, RunsFolder
from pipelines.inspect.run_files import CONFIG_FILE, METRICS_FILE
from pipelines.inspect.run_folders import RUNS, newest_audit, run_command
from pipelines.present.output import Report, Row, RowOutput
from pipelines.roles import described

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.inspect.run_folders import RunFolder
    from pipelines.inspect.run_state.events import RoleState
    from pipelines.inspect.run_state.state import RunState

COLUMNS = ("run", "status", "phase", "started", "duration", "restarts", "folder")


def list_command(printing: Printing, folder: RunsFolder = RUNS) -> RowOutput:
    """List the runs of this machine, newest first. Status `died`: the run's supervisor was killed. `deleting`: its
    deletion goes on, or was interrupted; then repeat `laminar runs delete`.

    \b
    Examples:
      laminar runs list
      laminar runs list --json | jq '.[] | select(.status == "running")'
      laminar runs list -O csv
    """
    from pipelines.inspect.run_folders import list_runs

    rows = [to_json(each) for each in list_runs(folder)]
    return RowOutput([rows], COLUMNS, printing.form(), f"there are no runs under {folder}/", cells=_cells)


def status_command(run: RunOption = None, folder: RunsFolder = RUNS, json: JsonOption = False) -> Report:
    """Show a run's status: phase, progress, accuracy, and each of its processes. Exits with 1 if it failed or died.

    For each process: the time since its last liveness report, its current step, the time in that step, and the step's
    budget. A `stalled` step has exceeded its budget (section [progress] of the configuration).

    A role of `submit --detach` has two processes: the respawner, and the process that works. `unsupervised`: the
    respawner has ended, so the role works, but would not be started again. `died`: both have ended. `failed`: the role
    is not started again, for the reason shown. Below a role that was started again is its last error.
    `removed`: `laminar runs stop --role` has ended it for good. A role in the foreground is `up` or `ended`.

    \b
    Examples:
      laminar runs status
      laminar runs status --run first --json | jq .optimizer_steps
    """
    from pipelines.inspect.run_folders import find_run

    found = find_run(folder, run)
    state, problem = (_read_state(found), None) if found.supervised else state_from_log(found)
    phase = _phase(found, state, problem)
    data = {**to_json(found), "phase": phase}
    for name, role in data["roles"].items():
        role["liveness"] = _liveness(found, name, role) if _is_listed(found) and role.get("alive") else None
    audit = newest_audit(found.folder)
    return Report(
        {**data, **_measured(state), "kafka": problem, "audit": audit},
        lambda: "\n".join(_status_lines(found, state, phase, data["roles"], problem, audit)),
        as_json=json,
        exit_code=1 if found.status in ("failed", "died") else 0,
    )


def to_json(run: RunFolder) -> dict[str, Any]:
    """Return what the commands `list`, `status` and `stop` print of a run, JSON-ready."""
    return {
        "run": run.run,
        "status": run.status,
        "phase": run.state.get("phase"),
        "folder": str(run.folder),
        "host": run.state.get("host"),
        "pid": run.state.get("pid"),
        "bootstrap_servers": run.state.get("bootstrap_servers"),
        "started_at": run.state.get("started_at"),
        "ended_at": run.state.get("ended_at"),
        "downtime_s": run.downtime_s,
        "error": run.state.get("error"),
        "goal": run.goal,
        "roles": run.state.get("roles") or {},
    }


def _cells(run: Row) -> Row:
    """Return the table cells of a row of `to_json`."""
    from pipelines.present.view.text import clock

    works = run["status"] == "running" or any(role.get("alive") for role in run["roles"].values())
    started, ended = run["started_at"], run["ended_at"] or (time.time() if works else None)
    return {
        **run,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if started else None,
        "duration": clock(ended - started - run["downtime_s"]) if started and ended else None,
        "restarts": sum(role.get("restarts", 0) for role in run["roles"].values()),
    }


def _read_state(run: RunFolder) -> RunState:
    """Fold the run's metrics file into the state that the live view shows."""
    from pipelines.inspect.metrics_file import read_metrics
    from pipelines.inspect.run_state.events import PhaseStarted, RolesChanged, Tick
    from pipelines.inspect.run_state.local_run import started_run
    from pipelines.inspect.run_state.state import fold_all
    from pipelines.present.report.series import whole_run

    at = int((run.state.get("ended_at") or (time.time() if run.status == "running" else 0)) * 1000)
    state = started_run(run)
    metrics = read_metrics(run.folder / METRICS_FILE)
    ended = [] if run.status == "running" else [PhaseStarted(run.status, at)]
    state = replace(state, whole=whole_run(metrics) if ended else None)
    return fold_all(state, [*metrics, *ended, RolesChanged(_roles(run)), Tick(at)])


def state_from_log(run: RunFolder) -> tuple[RunState, str | None]:
    """Read the state of a run of `submit --detach`, which has no metrics file, from its topics.

    If they cannot be read the state has the processes only, and the reason is returned with it.
    """
    from infra.kafka.ranges import UnknownTopic
    from infra.kafka.readiness import BrokerUnreachable
    from pipelines.cli.options import connect
    from pipelines.cli.watch import attached, catch_up, ended_state
    from pipelines.inspect.run_state.events import RolesChanged, Tick
    from pipelines.inspect.run_state.state import fold_all

    try:
        connection = connect(str(run.folder.absolute()), None, None)
        with attached(connection, run) as watching:
            state = catch_up(watching)
    except (BrokerUnreachable, UnknownTopic) as error:
        return _read_state(run), str(error)
    if run.status != "running":
        return fold_all(ended_state(state, run), [RolesChanged(_roles(run))]), None
    return fold_all(state, [RolesChanged(_roles(run)), Tick(wall_ms())]), None


def _phase(run: RunFolder, state: RunState, problem: str | None) -> str:
    """Return the phase of `run`; of a submitted run that has not ended, as far as its topics and its roles show it."""
    from pipelines.inspect.run_state.events import work_phase

    shown = work_phase(state.step, state.goal)
    recorded = run.state.get("phase") or shown
    if run.supervised or problem is not None or run.status == "ended":
        return str(recorded)
    return "training" if recorded == "training" and not state.step else shown


def _roles(run: RunFolder) -> dict[str, RoleState]:
    from pipelines.inspect.run_state.events import RoleState

    alive, shown = run.status == "running", {"unsupervised": "up", "removed": "ended"}
    return {
        name: RoleState(
            role.get("pid"), role.get("restarts", 0), shown.get(role["status"], role["status"]) if alive else "ended"
        )
        for name, role in (run.state.get("roles") or {}).items()
    }


def _measured(state: RunState) -> dict[str, Any]:
    from pipelines.inspect.run_state.evaluation import unmeasured_rounds
    from pipelines.inspect.run_state.rates import progress, seconds_left
    from pipelines.present.view.state_json import measured

    last, before = state.evaluation, state.first_evaluation
    return {
        **measured(state),
        "progress": progress(state),
        "seconds_left": seconds_left(state),
        "heldout_before": before and before.greedy,
        "heldout": last and last.greedy,
        "heldout_sampled": last and last.sampled,
        "heldout_unmeasured": unmeasured_rounds(last) if last else [],
    }


def _liveness(run: RunFolder, role: str, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the last liveness report of the process of `role`, not of its predecessor; None if there is none."""
    from infra.runners.liveness import read_liveness
    from pipelines.roles import liveness_file

    report = read_liveness(liveness_file(run.folder, role))
    ended_at = status.get("last_ended_at")
    return None if report and ended_at and report["age_s"] > time.time() - ended_at else report


def _liveness_text(report: Mapping[str, Any] | None) -> str:
    """Return the liveness report of a process as a part of its status line."""
    if report is None:
        return ", no liveness report"
    text = f", alive {report['age_s']:.0f} s ago"
    for name, error in report["failed_threads"].items():
        text += f", thread {name} FAILED: {error}"
    for step in report["steps"].values():
        text += f", {'STALLED in' if step['stalled'] else 'in'} {step['phase']} for {step['seconds']:.0f}"
        text += f" of {step['budget_s']:g} s"
    return text


def _audit_line(folder: Path, audit: Mapping[str, Any]) -> str:
    from pipelines.inspect.audit.result import findings_text

    failed = f"FAILED: {findings_text(audit)}; `{run_command(folder, 'runs audit')}` lists them"
    passed = "passed" if audit["passed"] else failed
    return f"  {'audit':<12}{passed} ({max(0.0, time.time() - audit['at']):.0f} s ago)"


def _status_lines(
    run: RunFolder,
    state: RunState,
    phase: str,
    roles: Mapping[str, Mapping[str, Any]],
    problem: str | None,
    audit: Mapping[str, Any] | None,
) -> Iterator[str]:
    from pipelines.present.view.panels import fact_lines
    from pipelines.present.view.text import phase_name, steps_text, with_downtime

    phase = phase_name(phase)
    where = f" on {run.other_host}" if run.other_host else ""
    status = {"running": f"running{where}, {phase}", "died": f"died in phase {phase}"}.get(run.status, run.status)
    if not run.supervised and run.status in ("died", "failed"):
        status = f"{_names_of(roles, run.status)} {run.status}, {phase}"
    yield f"run {run.run}: {status}, {steps_text(state)}, {with_downtime(state.elapsed_s, run.downtime_s)}"
    if run.state.get("error"):
        yield f"  error       {run.state['error']}"
    has_topics = not run.supervised or (run.folder / CONFIG_FILE).exists()
    if (has_topics and run.status in ("died", "failed", "stopped")) or _names_of(roles, "unsupervised"):
        yield f"  resume      {run_command(run.folder, 'runs resume')}"
    yield from [f"  {'kafka':<12}{problem}"] if problem else ()
    yield from (f"  {label:<12}{value}" for label, value in fact_lines(state))
    yield from [_audit_line(run.folder, audit)] if audit is not None else ()
    yield from (f"  {name:<12}{_role_text(name, role)}" for name, role in roles.items() if _is_listed(run))
    if run.status == "running" and run.supervised:
        yield f"  {'supervisor':<12}pid {run.state.get('pid')}"
    yield f"  {'folder':<12}{run.folder}"


def _is_listed(run: RunFolder) -> bool:
    """Return whether the processes of `run` are shown; those of `submit --detach` may work though the run failed."""
    return run.status == "running" or not run.supervised


def _names_of(roles: Mapping[str, Mapping[str, Any]], status: str) -> str:
    return ", ".join(name for name, role in roles.items() if role.get("status") == status)


def _role_text(name: str, role: Mapping[str, Any]) -> str:
    """Return the status of a role, its processes by their names, and what its process does."""
    parts = [role["status"] + described(name).removeprefix(name)]
    parts += [f"pid {role['pid']}"] if role.get("pid") else []
    if "respawner" in role and role["alive"]:
        parts.append(f"respawner {role['respawner'] or 'has ended'}")
    parts += [counted(role["restarts"], "restart")] if role.get("restarts") else []
    text = ", ".join(parts) + (_liveness_text(role["liveness"]) if role["alive"] else "")
    if not (role["alive"] and role.get("last_error")):
        return text
    return f"{text}\n  {'':<12}last ended {time.time() - role['last_ended_at']:.0f} s ago: {role['last_error']}"
