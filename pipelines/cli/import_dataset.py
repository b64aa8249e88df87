"""`laminar import`: an exported dataset back into a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from infra.storage import StorageFolder, open_storage
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption
from pipelines.present.output import Report

app = Commands()


@app.command("import", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def import_(
    address: Address,
    context: typer.Context,
    folder: Annotated[
        Any, typer.Argument(metavar="DIR", help="An export of experiences, with the view full.", parser=open_storage)
    ],
    runner: Annotated[
        Literal["embedded", "prism", "flink", "portable"], typer.Option("--runner", help="The Beam runner.")
    ] = "embedded",
    json: JsonOption = False,
) -> Report:
    """Feed an exported dataset to a run's buffer, as experience: each row once, also where this command is killed.

    Its trajectories get ids of their own (i0.0) and the outcome `imported` once they are in a batch. The same command
    imports what the dataset has grown by since. Its tokens must be those of the run's model. What was held out is left
    out. Beam's own options follow after `--`.

    \b
    Examples:
      laminar import data/answers
      laminar import data/answers --run second --json
    """
    from infra.kafka.ranges import partition_ranges
    from infra.kafka.reading import read_topic
    from infra.runners.run import run_pipeline
    from operators.export.folder import ExportError, read_contents
    from operators.export.import_plan import importable
    from operators.io.shards import close_shards
    from pipelines.imports import build
    from pipelines.roles import configure_logging
    from schemas.records import Metric
    from schemas.topics import EXPERIENCES, METRICS

    importable(read_contents(folder))
    to = address.connect()
    partitions = len(partition_ranges(to.client, EXPERIENCES.name(to.run)))
    metrics = METRICS.name(to.run)
    before = {number: held.end for number, held in partition_ranges(to.client, metrics).items()}
    configure_logging()
    try:
        run_pipeline(
            lambda pipeline: build(pipeline, folder.absolute(), to.run, to.client, partitions),
            runner,
            context.args,
            close_shards,
        )
    except RuntimeError as error:
        raise ExportError(str(error).partition(" [while running")[0]) from error
    told = [row for record in read_topic(to.client, metrics, start=before) for row in record.rows]
    mine = [row for row in told if isinstance(row, Metric) and row.name == "import"]
    if not mine:
        raise ExportError(f"{folder} is not wholly imported: give the same command again")
    values = {name: int(value) for name, value in mine[-1].values.items()}
    data = {"folder": str(folder), "run": to.run, **values}
    return Report(data, lambda: _text(folder, to.run, values), as_json=json)


def _text(folder: StorageFolder, run: str, values: dict[str, int]) -> str:
    if not values["trajectories"]:
        return f"run {run} has all of {folder} already"
    last = values["first"] + values["groups"] - 1
    what = f"{values['trajectories']:,} trajectories of {values['groups']:,} groups, i{values['first']} to i{last}"
    return f"run {run} has {folder}: {what}"
