"""`laminar runs trim`: delete the oldest records of a run's log, up to a version that has a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.sizes import size_text
from pipelines.cli.options import Brokers, JsonOption, RunOption, RunsFolder, connect
from pipelines.inspect.run_folders import RUNS
from pipelines.present.output import Report, table
from pipelines.present.progress import ProgressPrinter

if TYPE_CHECKING:
    from pipelines.cli.options import RunClient
    from pipelines.inspect.run_folders import RunFolder
    from pipelines.trim.plan import TrimPlan
    from schemas.records import PolicyVersion

COLUMNS = ("partition", "from", "to", "records", "bytes", "limited_by")


def trim_command(
    kafka: Brokers,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", metavar="VERSION", help="epoch.number (1.12); by default the newest with a checkpoint."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore-group", metavar="GROUP", help="A group, as of an export or a gateway, that will not read again."
        ),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Delete the records; without it, a dry run.")] = False,
    run: RunOption = None,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Delete the oldest records of a run's log, up to a version that has a checkpoint. Dry run unless --execute.

    Only records of settled trajectories that no restart, export or consumer group needs are deleted. Exports,
    gateways and agents retain what they have not read, also if they will not run again: then give --ignore-group the
    group, from the column limited_by.
    A trim point with counts and hashes is written first, and the checkpoint kept in trim-points/ in the run's folder.
    Audit, replay and lineage then begin at the trim point; the audit's counts do not change. The run may keep running.
    Exits with 1 if the audit fails. Kafka frees disk space by whole segments (segment.bytes, by default 1 GiB): a small
    log stays as large as it is.

    \b
    Examples:
      laminar runs trim
      laminar runs trim --run first --version 1.200 --execute
    """
    from pipelines.inspect.run_folders import find_run

    with ProgressPrinter("connecting to the run's Kafka") as progress:
        connection = connect(run, kafka.brokers, kafka.command_config, folder, read_only=not execute)
        found = find_run(folder, run or connection.run)
        return _trim(connection, found, version, ignore or [], progress, execute, json)


def _trim(
    connection: RunClient,
    found: RunFolder,
    version: str | None,
    ignored: list[str],
    progress: ProgressPrinter,
    execute: bool,
    json: bool,
) -> Report:
    from infra.models.checkpoint_list import list_checkpoints
    from pipelines.config import load_config
    from pipelines.inspect.run_folders import config_file
    from pipelines.training_step import checkpoints_of
    from pipelines.trim.cuts import UnknownGroup
    from pipelines.trim.plan import TrimRefused, freed_bytes, plan_trim
    from pipelines.trim.plan import execute as execute_trim
    from schemas.records import PolicyVersion

    run_folder = found.folder
    if (file := config_file(run_folder)) is None:
        raise RuntimeError(f"{run_folder} has no configuration, which says where the checkpoints are")
    config = load_config(file)
    checkpoints = {PolicyVersion.parse(each.name): each for each in list_checkpoints(checkpoints_of(config))}
    try:
        chosen = _named(version, checkpoints)
        plan = plan_trim(
            *(connection.client, connection.run, checkpoints, chosen),
            begin=progress.begin,
            transaction_timeout_s=config.kafka.transaction_timeout_s,
            ignored_groups=ignored,
        )
        log = run_folder / "kafka" / "log"
        freed = freed_bytes(log, plan) if log.is_dir() else None
        if execute:
            progress.begin("writing the trim point, and deleting records")
            execute_trim(connection.client, plan, run_folder)
    except UnknownGroup as error:
        raise typer.BadParameter(str(error), param_hint="--ignore-group") from error
    except TrimRefused as refusal:
        reason = str(refusal)
        return Report(
            {"run": connection.run, "executed": False, "refused": reason}, lambda: reason, as_json=json, exit_code=1
        )
    data: dict[str, Any] = {
        "run": connection.run,
        "executed": execute,
        "trim_point": plan.trim_point.number,
        "version": str(plan.trim_point.version),
        "freed_bytes": freed,
        "checkpoint": plan.trim_point.checkpoint or None,
        "closed_below": dict(zip(plan.trim_point.purposes, plan.trim_point.closed_below, strict=True)),
        "counts": dict(zip(plan.trim_point.count_names, plan.trim_point.counts, strict=True)),
        "partitions": list(_rows(plan)),
    }
    return Report(data, lambda: _text(data, plan, found), as_json=json)


def _named(version: str | None, checkpoints: Collection[PolicyVersion]) -> PolicyVersion | None:
    from schemas.records import PolicyVersion
    from schemas.records.versions import named_version

    if version is None:
        return None
    try:
        found = named_version(version, checkpoints)
        if found is None and "." in version:
            found = PolicyVersion.parse(version)  # the plan says why it cannot be a trim point
        if found is None:
            known = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise ValueError(f"there is no checkpoint of version {version}; there are: {known}")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--version") from error
    return found


def _rows(plan: TrimPlan) -> Iterator[dict[str, Any]]:
    for partition, cut in plan.cuts.items():
        values = (str(partition), cut.begin, cut.offset, cut.records, cut.size, cut.held_by)
        yield dict(zip(COLUMNS, values, strict=True)) | {"blake3": cut.digest}


def _text(data: dict[str, Any], plan: TrimPlan, found: RunFolder) -> Any:
    from rich.console import Group

    from pipelines.inspect.run_folders import laminar_command, run_argument

    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in data["counts"].items() if count)
    size, records = sum(plan.trim_point.byte_counts), sum(plan.trim_point.record_counts)
    verb = "begins" if data["executed"] else "would begin"
    deleted = "deleted" if data["executed"] else "to delete"
    lines = [
        f"the log of run {plan.run} {verb} at version {data['version']}: {records:,} records, {size:,} bytes {deleted}"
    ]
    lines.append(f"counts in the trim point: {counts or 'none'}")
    if (freed := data["freed_bytes"]) is not None:
        worth = "" if freed else ", so this trim frees nothing"
        if not freed and found.status == "running":
            worth += " yet: wait until the log has grown"
        elif not freed:
            worth += (
                ", and the log of a run that has ended does not grow: "
                f"`{laminar_command()} runs delete {shlex.quote(run_argument(found.folder))}` frees all of it"
            )
        lines.append(f"on disk: {size_text(freed)}. Kafka deletes whole segments, of 1 GiB by default{worth}")
    if not data["executed"]:
        lines.append("Dry run: nothing was deleted. Use --execute.")
    return Group(table(data["partitions"], COLUMNS), *lines)
