"""`laminar trace`: write a run's trace for Perfetto."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated

import typer

from infra.files import replacing
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption
from pipelines.inspect.log.trace import events
from pipelines.present.output import Report

app = Commands()


@app.command()
def trace(
    address: Address,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The trace file; by default in the run's folder.")
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Write a run's trace: trajectories on their replicas, scoring, optimizer steps, versions, plans and counters.

    Open the file in ui.perfetto.dev or chrome://tracing. A span has the `traceparent` of its records' headers.

    \b
    Examples:
      laminar trace
      laminar trace --run first --out first.json
    """
    connection = address.open_log()
    count, file_name = 0, out or (address.folder or Path()) / "trace.json"
    with replacing(file_name) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for count, event in enumerate(events(connection.client, connection.run), 1):
            file.write(("" if count == 1 else ",\n") + jsons.dumps(event))
        file.write("\n]}\n")
    text = f"wrote {count:,} events of run {connection.run} to {file_name}: open it in ui.perfetto.dev"
    return Report({"run": connection.run, "file": str(file_name), "events": count}, lambda: text, as_json=json)
