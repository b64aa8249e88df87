"""`laminar runs logs`, `resume`, `drain` and `compare`: print the logs of runs, resume, drain and compare runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.escaping import print_escaped
from pipelines.cli.options import JsonOption, Printing, RunOption, RunsFolder
from pipelines.inspect.run_files import LOGS, SUBMITTED
from pipelines.inspect.run_folders import RUNS, RunFolder
from pipelines.present.output import Report, RowOutput, table

if TYPE_CHECKING:
    from pipelines.inspect.submissions import Submission

POLL_S = 0.5
KAFKA_TIMEOUT_S = 3.0


def logs_command(
    printing: Printing,
    role: Annotated[str, typer.Argument(metavar="[ROLE]", help="One role (score, rollout-0); by default all.")] = "",
    count: Annotated[int, typer.Option("-n", min=0, help="How many of the last lines of each role.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines until stopped.")] = False,
    run: RunOption = None,
    folder: RunsFolder = RUNS,
) -> RowOutput:
    """Print the last lines of the logs of a run's processes.

    \b
    Examples:
      laminar runs logs
      laminar runs logs trainer -n 100 --run first
      laminar runs logs score -f
    """
    from pipelines.inspect.run_folders import find_run
    from pipelines.roles import LIGHT, shares_process

    logs = find_run(folder, run).folder / LOGS
    files = {file.stem: file for file in sorted(logs.glob("*.log"))}
    if role not in files and LIGHT in files and shares_process(role):
        role = LIGHT  # the compact layout: one process, and one log, for these roles
    if role and role not in files:
        raise typer.BadParameter(f"{logs} has no log of {role!r}; there are {', '.join(files) or 'none'}")
    chosen = {role: files[role]} if role else files
    parts = ([line] for line in _log_lines(chosen, count, follow))
    none = f"the logs in {logs} have no lines" if files else f"there are no logs in {logs}"
    form = printing.form("lines", follow=follow)
    return RowOutput(parts, None, form, none, line=lambda row: f"{row['role']:<12} {row['line']}")


def _log_lines(files: dict[str, Path], count: int, follow: bool) -> Iterator[dict[str, str]]:
    ends = {}
    for role, file in files.items():
        data = file.read_bytes()
        ends[role] = len(data)
        lines = data.decode(errors="replace").splitlines()
        yield from ({"role": role, "line": line} for line in lines[max(0, len(lines) - count) :])
    while follow:
        time.sleep(POLL_S)
        for role, file in files.items():
            with file.open("rb") as log:
                log.seek(ends[role])
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            ends[role] += len(whole)
            yield from ({"role": role, "line": line} for line in whole.decode(errors="replace").splitlines())


def resume_command(
    context: typer.Context,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting from now on; may be repeated."),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Use data, code and model files that have changed since the start.")
    ] = False,
    run: RunOption = None,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Resume a run that was stopped or killed, or whose machine failed, from its log and its newest checkpoint.

    Pipelines submitted with --detach are started again in the background, except those that `laminar runs stop --role`
    has ended; each is checked before the first is started. A process whose respawner was killed is stopped, and its
    successor continues. A run of `laminar run` continues in the
    foreground until it reaches its goal, with its own broker. A run that has reached its goal continues with more
    optimizer steps; its model so far stays as model-STEPS.

    A run is not resumed if a file that it reads has changed since it started: prompts, held-out questions, the code of
    rewards, environments and agents with what it imports beside it, the model's folder.

    \b
    Examples:
      laminar runs resume
      laminar runs resume --run first
      laminar runs resume --run first --set trainer.optimizer_steps=200
    """
    from pipelines.inspect.run_folders import find_run_to_resume, laminar_command
    from pipelines.inspect.submissions import submissions
    from pipelines.run.submission.detached import start_respawner
    from pipelines.run.submission.role_checks import check_submissions

    found = find_run_to_resume(folder, run)
    if found.reached and not changes:
        nothing = {"run": found.run, "resumed": {}}
        text = f"run {found.run} has reached its goal; to extend it: --set trainer.optimizer_steps=NUMBER"
        return Report(nothing, lambda: f"nothing to resume: {text}", as_json=json)
    stopped = found.supervised and found.status != "running"
    if changes and not stopped:
        raise typer.BadParameter(_unchangeable(found), param_hint="--set")
    submitted = submissions(found.folder)
    absent = [each for each in submitted if each.state != "removed" and each.respawner() is None]
    check_submissions(found.folder, absent, accept_changes=accept_changes)
    resumed = [start_respawner(each) for each in absent]
    if stopped:
        from pipelines.run.local import resume_locally
        from pipelines.run.stop_requests import StopRequests

        stops = context.with_resource(StopRequests(final=bool(context.obj)))
        return resume_locally(found, stops, changes=changes or [], accept_changes=accept_changes, as_json=json)
    data = {"run": found.run, "resumed": {each.role.name: each.pid for each in resumed}}
    names = ", ".join(each.role.name for each in resumed)
    text = f"resumed run {found.run}: {names}" if resumed else f"nothing to resume: all of run {found.run} is running"
    if not submitted:
        text = f"nothing to resume: no role of run {found.run} was submitted with --detach"
    if removed := [each.role.name for each in submitted if each.state == "removed"]:
        again = f"{laminar_command()} submit ROLE {found.folder / SUBMITTED}/ROLE.toml --detach"
        text += f"; ended for good: {', '.join(removed)} (`{again}` starts one again)"
    if resumed and (reason := _kafka_problem(resumed[0])):
        text += f". The roles wait for Kafka, which does not respond: {reason}"
    return Report(data, lambda: text, as_json=json)


def _kafka_problem(submitted: Submission) -> str | None:
    from infra.kafka.readiness import connection_problem
    from pipelines.config import load_config

    return connection_problem(load_config(submitted.config).kafka.client().admin(), KAFKA_TIMEOUT_S)


def _unchangeable(found: RunFolder) -> str:
    """Why a resumption cannot change settings of a run that is running or was submitted, and how they are changed."""
    from pipelines.inspect.run_folders import laminar_command, run_command

    if found.supervised:
        return f"run {found.run} is running: stop it before with `{run_command(found.folder, 'runs stop')}`"
    return (
        f"each role of run {found.run} was submitted with a configuration of its own, in {found.folder / SUBMITTED}/: "
        f"end the role with `{run_command(found.folder, 'runs stop --role ROLE')}`, then submit it again with "
        f"`{laminar_command()} submit ROLE {found.folder / SUBMITTED}/ROLE.toml --detach --set SECTION.KEY=VALUE`"
    )


def drain_command(
    run: RunOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long the drain may take.")
    ] = 600.0,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Drain the pipelines submitted with --detach: stop new prompts, finish and score all trajectories, then stop the
    pipelines in order. Exits with 1 if --timeout passes before.

    \b
    Examples:
      laminar runs drain --run first --timeout 3600
    """
    from pipelines.config import load_config
    from pipelines.inspect.log.pauses import is_paused
    from pipelines.inspect.run_folders import find_run, run_command
    from pipelines.inspect.submissions import submissions
    from pipelines.roles import DATA_PLANE
    from pipelines.run.drain import drain
    from pipelines.run.submission.detached import remove_unused_store

    found = find_run(folder, run)
    running = [each for each in submissions(found.folder) if each.respawner() is not None]
    if not running:
        raise typer.BadParameter(f"no pipeline submitted with --detach is running in run {found.run}")
    deadline, config = time.monotonic() + timeout, load_config(running[0].config)
    if any(each.pipeline == DATA_PLANE for each in running) and not is_paused(config.kafka.client(), found.run):
        raise typer.BadParameter(
            f"the data plane of run {found.run} is one job, whose prompts cannot stop alone: "
            f"`{run_command(found.folder, 'runs pause')}` first"
        )
    left = drain(running, config, deadline, lambda line: print_escaped(line, err=True))
    data = {"run": found.run, "drained": not left, "running": left}
    store = "" if left else remove_unused_store(running)
    text = f"run {found.run} is drained" if not left else f"still running after {timeout:g} s: {', '.join(left)}"
    text += f"; {store}" if store else ""
    return Report(data, lambda: text, as_json=json, exit_code=1 if left else 0)


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more, by name.")],
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Compare runs side by side: reward, accuracy, staleness, speed, audit. `laminar report` adds their curves.

    \b
    Examples:
      laminar runs compare first second
      laminar runs compare first second third --json
    """
    from pipelines.inspect.run_folders import find_run
    from pipelines.present.report.comparison import ComparedRun, text_rows
    from pipelines.present.report.html import LABELS
    from pipelines.present.report.summary import read_summary

    compared = [ComparedRun(name, read_summary(find_run(folder, name).folder), ()) for name in runs]
    data = [{key: each.summary.get(key) for key in ("run", *LABELS)} for each in compared]
    return Report(data, lambda: table(text_rows(compared), ["metric", *runs]), as_json=json)
