"""`laminar runs resume`: continue a run that was stopped or killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import JsonOption, RunOption, RunsFolder
from pipelines.inspect.run_files import SUBMITTED
from pipelines.inspect.run_folders import RUNS, RunFolder
from pipelines.present.output import Report

if TYPE_CHECKING:
    from pipelines.inspect.submissions import Submission

KAFKA_TIMEOUT_S = 3.0


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
    if resumed:
        text = f"resumed run {found.run}: {names}"
    elif submitted or found.supervised:
        text = f"nothing to resume: all of run {found.run} is running"
    else:
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
