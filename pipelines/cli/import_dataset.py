"""`laminar import`: import an exported dataset into a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from infra.runners.options import RunnerName
from infra.storage import StorageFolder, open_storage
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption, TransactionalAddress
from pipelines.present.output import Report

app = Commands()


@app.command("import", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def import_(
    address: TransactionalAddress,
    context: typer.Context,
    folder: Annotated[
        Any, typer.Argument(metavar="DIR", help="An export of experiences with --view full.", parser=open_storage)
    ],
    runner: Annotated[RunnerName, typer.Option("--runner", help="The Beam runner.")] = "embedded",
    json: JsonOption = False,
) -> Report:
    """Import an exported dataset into a run's experience buffer: each row once, even if this command is killed.

    Imported trajectories get their own ids (i0.0), and the outcome `imported` once they are in a batch. Repeat the
    command to import rows that were added to the dataset since. The dataset's token ids must be those of the run's
    model. Held-out rows are not imported. Pass Beam's own options after `--`.

    \b
    Examples:
      laminar import data/answers
      laminar import data/answers --run second --json
    """
    from infra.kafka.ranges import partition_ranges
    from infra.kafka.topic_reader import read_rows
    from infra.runners.role_logging import configure_logging
    from infra.runners.run import run_pipeline
    from operators.export.folder import ExportError, read_contents
    from operators.export.import_plan import check_importable
    from operators.io.shards import close_shards
    from pipelines.imports import build
    from schemas.records import Metric
    from schemas.topics import EXPERIENCES, METRICS

    check_importable(read_contents(folder))
    connection = address.connect()
    partitions = len(partition_ranges(connection.client, EXPERIENCES.name(connection.run)))
    metrics = METRICS.name(connection.run)
    before = {number: offsets.end for number, offsets in partition_ranges(connection.client, metrics).items()}
    timeout_s = address.transaction_timeout_s
    configure_logging()
    try:
        run_pipeline(
            lambda pipeline: build(
                pipeline, folder.absolute(), connection.run, connection.client, partitions, timeout_s
            ),
            runner,
            context.args,
            close_shards,
        )
    except RuntimeError as error:
        raise ExportError(str(error).partition(" [while running")[0]) from error
    results = [row for row in read_rows(connection.client, metrics, Metric, before) if row.name == "import"]
    if not results:
        raise ExportError(f"the import of {folder} is incomplete: repeat the command to finish it")
    values = {name: int(value) for name, value in results[-1].values.items()}
    data = {"folder": str(folder), "run": connection.run, **values}
    return Report(data, lambda: _text(folder, connection.run, values), as_json=json)


def _text(folder: StorageFolder, run: str, values: dict[str, int]) -> str:
    if not values["trajectories"]:
        return f"nothing to import: run {run} has all of {folder} already"
    last = values["first"] + values["groups"] - 1
    what = f"{values['trajectories']:,} trajectories of {values['groups']:,} groups, i{values['first']} to i{last}"
    return f"imported {folder} into run {run}: {what}"
