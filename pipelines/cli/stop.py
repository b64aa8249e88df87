"""`laminar runs stop`: stop a run, or one role of `submit --detach` for good."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import psutil
import typer

from infra.escaping import print_escaped
from pipelines.cli.local_runs import to_json
from pipelines.cli.options import JsonOption, RunOption, RunsFolder
from pipelines.cli.resume import KAFKA_TIMEOUT_S
from pipelines.inspect.run_files import AUDIT_FILE, CONFIG_FILE, SUBMITTED
from pipelines.inspect.run_folders import RUNS, RunFolder
from pipelines.present.output import Report

_STOP_S = 60.0
"""Seconds that roles may take to end."""


def stop_command(
    run: RunOption = None,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="Only this role of `submit --detach` (rollout-1), for good.")
    ] = "",
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="How long to wait until it has stopped; by default 60, and 390 for a role on Flink.",
        ),
    ] = None,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Stop a run: its roles drain and commit, then its own broker stops. Exits with 1 if it still runs after --timeout.

    A role that is stopped with --role is not resumed with its run; `laminar submit ROLE --detach` starts it again. To
    end a rollout without generating a token twice, drain its replicas first: `laminar replicas drain`. Where the
    trainer of a run was submitted that has trained all steps, the run is audited once, however long that takes; exits
    with 1 if that failed, too.

    \b
    Examples:
      laminar runs stop
      laminar runs stop --run first --timeout 120
      laminar runs stop --run first --role rollout-1
    """
    from pipelines.inspect.run_folders import find_run, has_ended, process_of, read_run, stop_run
    from pipelines.inspect.submissions import stop_time_s, submissions
    from pipelines.run.submission.detached import remove_unused_store
    from pipelines.run.submission.detached import stop as stop_submitted

    found = find_run(folder, run)
    if role:
        return _stop_role(found, role, timeout, as_json=json)
    submitted = submissions(found.folder)
    timeout = stop_time_s(submitted, _STOP_S) if timeout is None else timeout
    deadline = time.monotonic() + timeout
    active = found.status == "running" or any(each.status in ("up", "unsupervised") for each in submitted)
    stopped = stop_run(found, timeout)
    for each in submitted:
        stopped = stop_submitted(each, deadline) and stopped
    foreground = [] if found.supervised else [role for role in found.state["roles"].values() if "respawner" not in role]
    processes = [*filter(None, map(process_of, foreground))]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    stopped = all(has_ended(each, deadline) for each in processes) and stopped
    if not active:
        text = f"run {found.run} is not running: its status is {found.status}"
    elif stopped:
        text = f"run {found.run} stopped"
    else:
        pid = found.state.get("pid")
        what = f"process {pid}" if pid else "submitted pipelines"
        text = f"run {found.run} ({what}) is still running after {timeout:g} s: see {found.folder}/logs"
    if stopped and (store := remove_unused_store(submitted)):
        text += f"; {store}"
    trains = any((found.folder / SUBMITTED).glob("trainer*.toml"))  # also those in the foreground, which have ended
    unaudited = trains and not found.supervised and not (found.folder / AUDIT_FILE).exists()
    passed, audited = _final_audit(found) if stopped and unaudited else (True, "")
    text += f"; {audited}" if audited else ""
    now, code = read_run(found.folder), 0 if stopped and passed else 1
    return Report({**to_json(now), "stopped": stopped}, lambda: text, as_json=json, exit_code=code)


def _final_audit(found: RunFolder) -> tuple[bool, str]:
    """Audit a run that has trained all its steps; whether that passed, and in words. Another run is to be resumed."""
    from infra.kafka.readiness import ClientError, connection_problem
    from pipelines.config import ConfigError, load_config
    from pipelines.inspect.log.manifests import final_version
    from pipelines.inspect.run_folders import config_file
    from pipelines.run.drain import final_audit

    with suppress(ConfigError, ClientError, OSError):  # it has stopped all the same
        config = load_config(config_file(found.folder) or found.folder / CONFIG_FILE)
        client = config.kafka.client()
        if not connection_problem(client.admin(), KAFKA_TIMEOUT_S) and final_version(client, config.run.name):
            print_escaped("the run has trained all its steps: auditing its whole log, which may take minutes", err=True)
            return final_audit(found.folder, config)
    return True, ""


def _stop_role(found: RunFolder, role: str, timeout: float | None, *, as_json: bool) -> Report:
    from pipelines.inspect.run_folders import read_run
    from pipelines.inspect.submissions import stop_time_s, submissions
    from pipelines.run.submission.detached import remove

    by_name = {each.role.name: each for each in submissions(found.folder)}
    if role not in by_name:
        known = ", ".join(by_name) or "none"
        reason = f"no role {role!r} of run {found.run} was submitted with --detach; there are: {known}"
        raise typer.BadParameter(reason, param_hint="--role")
    timeout = stop_time_s([by_name[role]], _STOP_S) if timeout is None else timeout
    stopped = remove(by_name[role], time.monotonic() + timeout)
    log = by_name[role].log
    ended = f"{role} of run {found.run} has ended, and is not resumed with the run"
    text = ended if stopped else f"{role} of run {found.run} is still running after {timeout:g} s: see {log}"
    data = {**to_json(read_run(found.folder)), "stopped": stopped}
    return Report(data, lambda: text, as_json=as_json, exit_code=0 if stopped else 1)
