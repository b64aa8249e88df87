"""`laminar runs trim`: let the log of a run begin at a version that has a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.options import RUNS, Brokers, JsonOption, RunOption, connect
from pipelines.present.output import Report, table

if TYPE_CHECKING:
    from pipelines.run.trim.plan import TrimPlan
    from schemas.records import PolicyVersion

COLUMNS = ("partition", "from", "to", "records", "bytes", "what stays first")


def trim_command(
    kafka: Brokers,
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="VERSION", help="epoch.number; by default the newest with a checkpoint."),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this nothing is changed.")] = False,
    run: RunOption = None,
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where the runs are.")] = RUNS,
    json: JsonOption = False,
) -> Report:
    """Delete the oldest records of a run's log, up to a version that has a checkpoint. A dry run unless --execute.

    What goes has ended, is counted and hashed in a trim point that is written first, and is needed by no restart,
    export or group. The checkpoint is kept in the run's folder under trim-points/. Audit, replay and lineage begin at
    the trim point and say so; the audit's numbers stay the same. A run may be at work meanwhile. Exits with 1 where the
    audit fails.

    \b
    Examples:
      laminar runs trim
      laminar runs trim --run first --version 1.200 --execute
    """
    from operators.trainer.checkpoint import list_checkpoints
    from pipelines.config import load_config
    from pipelines.inspect.run_folders import find_run
    from pipelines.run.trim.execute import execute as make
    from pipelines.run.trim.plan import TrimRefused, plan_trim
    from pipelines.trainer import checkpoints_of
    from schemas.records import PolicyVersion

    to = connect(run, kafka.brokers, kafka.command_config, folder)
    place = find_run(folder, to.run).folder
    config = load_config(place / "config.toml")
    checkpoints = {PolicyVersion.parse(each.name): each for each in list_checkpoints(checkpoints_of(config))}
    try:
        plan = plan_trim(to.client, to.run, checkpoints, _parsed(version))
    except TrimRefused as refusal:
        why = str(refusal)
        return Report({"run": to.run, "executed": False, "refused": why}, lambda: why, as_json=json, exit_code=1)
    if execute:
        make(to.client, plan, place)
    data: dict[str, Any] = {
        "run": to.run,
        "executed": execute,
        "trim_point": plan.trim_point.number,
        "version": str(plan.trim_point.version),
        "checkpoint": plan.trim_point.checkpoint or None,
        "closed_below": dict(zip(plan.trim_point.purposes, plan.trim_point.closed_below, strict=True)),
        "counts": dict(zip(plan.trim_point.count_names, plan.trim_point.counts, strict=True)),
        "partitions": list(_rows(plan)),
    }
    return Report(data, lambda: _text(data, plan), as_json=json)


def _parsed(version: str | None) -> PolicyVersion | None:
    from schemas.records import PolicyVersion

    try:
        return None if version is None else PolicyVersion.parse(version)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--version") from error


def _rows(plan: TrimPlan) -> Iterator[dict[str, Any]]:
    for place, cut in plan.cuts.items():
        values = (str(place), cut.begin, cut.offset, cut.records, cut.size, cut.held_by)
        yield dict(zip(COLUMNS, values, strict=True)) | {"blake3": cut.digest}


def _text(data: dict[str, Any], plan: TrimPlan) -> Any:
    from rich.console import Group

    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in data["counts"].items() if count)
    size, records = sum(plan.trim_point.byte_counts), sum(plan.trim_point.record_counts)
    what = "begins" if data["executed"] else "would begin"
    lines = [f"the log of run {plan.run} {what} at version {data['version']}: {records:,} records, {size:,} bytes less"]
    lines.append(f"ended before, as the trim point says: {counts or 'nothing'}")
    if not data["executed"]:
        lines.append("nothing was changed: --execute does it")
    return Group(table(data["partitions"], COLUMNS), *lines)
