"""`laminar runs resume`: continue a run that was stopped or killed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import JsonOption, RunOption, RunsFolder
from pipelines.inspect.run_files import SUBMITTED
from pipelines.inspect.run_folders import RUNS, RunFolder, laminar_command, run_command
from pipelines.present.output import Report

if TYPE_CHECKING:
    from pipelines.inspect.submissions import Submission

KAFKA_TIMEOUT_S = 3.0
_STOP_S = 120.0
"""Seconds that roles may take to stop before they are submitted again."""


def resume_command(
    context: typer.Context,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting from now on; may be repeated."),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Use data, code and model files that have changed since the start.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="How long roles may take to stop, with --set; by default 120, and 450 with one on Flink.",
        ),
    ] = None,
    run: RunOption = None,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Resume a run that was stopped or killed, or whose machine failed, from its log and its newest checkpoint.

    Pipelines submitted with --detach are started again in the background, except those that `laminar runs stop --role`
    has ended; each is checked before the first is started. A process whose respawner was killed is stopped, and its
    successor continues. With --set those that read the setting are stopped and submitted again; one that has not ended
    after --timeout ends later, and needs another `laminar runs resume` then (exit code 1). A run of `laminar run`
    continues in the foreground until it reaches its goal, with its own broker. A run at its goal continues with more
    optimizer steps; its model so far stays as model-STEPS.

    A run is not resumed if a file that it reads has changed since it started: prompts, held-out questions, the code of
    rewards, environments and agents with what it imports beside it, the model's folder.

    \b
    Examples:
      laminar runs resume
      laminar runs resume --run first
      laminar runs resume --run first --set trainer.optimizer_steps=200
    """
    from pipelines.inspect.run_folders import find_run_to_resume
    from pipelines.inspect.submissions import submissions

    found = find_run_to_resume(folder, run)
    submitted = submissions(found.folder)
    if not changes and (found.reached or _is_at_goal(found, submitted)):
        nothing = {"run": found.run, "resumed": {}}
        text = f"run {found.run} has reached its goal; to extend it: --set trainer.optimizer_steps=NUMBER"
        if any(each.working_process() for each in submitted):
            text += f"; to end it: `{run_command(found.folder, 'runs drain')}`"
        return Report(nothing, lambda: f"nothing to resume: {text}", as_json=json)
    stopped = found.supervised and found.status != "running"
    if changes and not stopped and (found.supervised or not submitted):
        raise typer.BadParameter(_unchangeable(found), param_hint="--set")
    if not stopped:
        return _resume_submitted(found, submitted, changes or [], accept_changes, timeout, json)
    from pipelines.run.local import resume_locally
    from pipelines.run.stop_requests import StopRequests
    from pipelines.run.submission.detached import start_respawner

    for each in _absent(found, submitted, [], accept_changes):
        start_respawner(each)
    stops = context.with_resource(StopRequests(final=bool(context.obj)))
    return resume_locally(found, stops, changes=changes or [], accept_changes=accept_changes, as_json=json)


def _is_at_goal(found: RunFolder, submitted: Sequence[Submission]) -> bool:
    """Whether a run with `submitted` roles has reached its goal, as far as its Kafka shows it.

    Only where the trainer and evaluation were submitted: the goal of another machine's file may have been extended, and
    the last evaluation may wait for the roles of this machine.
    """
    if found.supervised or not any(each.pipeline == "trainer" for each in submitted):
        return False
    from infra.kafka.ranges import UnknownTopic
    from infra.kafka.readiness import BrokerUnreachable, ClientError
    from pipelines.cli.options import connect
    from pipelines.cli.watch import attached, catch_up
    from pipelines.config import ConfigError, load_config
    from pipelines.inspect.run_folders import config_file
    from pipelines.inspect.run_state.goal import is_evaluated, is_reached

    file = config_file(found.folder)
    # A wrong setting is shown when the roles are checked; this machine may have no rights to read the metrics.
    with suppress(ConfigError, typer.BadParameter, OSError, ValueError, ClientError, BrokerUnreachable, UnknownTopic):
        config = load_config(file or submitted[0].config)
        roles = {role.pipeline for each in submitted if each.state != "removed" for role in each.roles(config)}
        if not {"trainer", *(["evaluation"] if is_evaluated(config) else [])} <= roles:
            return False
        with attached(connect(str(found.folder.absolute()), None, None), found) as watching:
            return is_reached(catch_up(watching), config)
    return False


def _absent(
    found: RunFolder, submitted: Sequence[Submission], changes: list[str], accept_changes: bool
) -> list[Submission]:
    """The roles that have ended, but not for good; they can run with `changes`. Raises ConfigProblems."""
    from pipelines.run.submission.role_checks import check_submissions

    absent = [each for each in submitted if each.state != "removed" and each.respawner() is None]
    check_submissions(found.folder, absent, changes, accept_changes=accept_changes)
    return absent


def _resume_submitted(
    found: RunFolder,
    submitted: Sequence[Submission],
    changes: list[str],
    accept_changes: bool,
    timeout_s: float | None,
    as_json: bool,
) -> Report:
    from pipelines.inspect.submissions import read_submission, stop_time_s
    from pipelines.run.submission.change import SettingsChange
    from pipelines.run.submission.detached import start_respawner
    from pipelines.run.submission.role_checks import check_submissions

    change = SettingsChange(submitted, changes) if changes else None
    absent = _absent(found, submitted, changes, accept_changes)
    again = [each for each in change.concerned if each not in absent] if change is not None else []
    check_submissions(found.folder, again, changes, accept_changes=accept_changes)
    left: list[str] = []
    if change is not None:
        left = change.apply(stop_time_s(change.concerned, _STOP_S) if timeout_s is None else timeout_s)
    resumed = [start_respawner(each) for each in absent]
    again = [start_respawner(read_submission(each.file)) for each in again if each.role.name not in left]
    data = {"run": found.run, "resumed": {each.role.name: each.pid for each in (*resumed, *again)}, "running": left}
    parts = [f"changed {', '.join(change.keys) or 'nothing'} of run {found.run}"] if change is not None else []
    parts += [f"submitted again: {_names(again)}"] if again else []
    parts += [f"still ending: {', '.join(left)} (`{run_command(found.folder, 'runs resume')}` then)"] if left else []
    if resumed:
        parts.append(f"resumed run {found.run}: {_names(resumed)}")
    elif not parts:
        parts.append(_nothing(found, submitted))
    if removed := [each.role.name for each in submitted if each.state == "removed"]:
        start = f"{laminar_command()} submit ROLE {found.folder / SUBMITTED}/ROLE.toml --detach"
        parts.append(f"ended for good: {', '.join(removed)} (`{start}` starts one again)")
    text = "; ".join(parts)
    if (started := [*resumed, *again]) and (reason := _kafka_problem(started[0])):
        text += f". The roles wait for Kafka, which does not respond: {reason}"
    return Report(data, lambda: text, as_json=as_json, exit_code=1 if left else 0)


def _nothing(found: RunFolder, submitted: Sequence[Submission]) -> str:
    if submitted or found.supervised:
        return f"nothing to resume: all of run {found.run} is running"
    return f"nothing to resume: no role of run {found.run} was submitted with --detach"


def _names(submitted: Sequence[Submission]) -> str:
    return ", ".join(each.role.name for each in submitted)


def _kafka_problem(submitted: Submission) -> str | None:
    from infra.kafka.readiness import connection_problem
    from pipelines.config import load_config

    config = load_config(submitted.config)
    kafka = config.kafka.for_role(submitted.roles(config)[0].pipeline)
    return connection_problem(kafka.client().admin(), KAFKA_TIMEOUT_S)


def _unchangeable(found: RunFolder) -> str:
    """Why a resumption cannot change settings of a run that is running, or whose roles no respawner keeps running."""
    if found.supervised:
        return f"run {found.run} is running: stop it before with `{run_command(found.folder, 'runs stop')}`"
    return (
        f"no role of run {found.run} was submitted with --detach: end each that reads the setting (Ctrl-C or SIGTERM "
        f"drain it), and start it again with `{laminar_command()} submit ROLE CONFIG --set SECTION.KEY=VALUE`"
    )
