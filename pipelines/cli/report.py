"""`laminar report`: write the HTML report of a run, or the comparison of several runs."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption, RunOption, RunsFolder, connect
from pipelines.cli.trajectory import model_of
from pipelines.inspect.run_files import INSIGHT_FILE, METRICS_FILE, REPORT_FILE, SAMPLES_FILE
from pipelines.inspect.run_folders import RUNS
from pipelines.present.output import Report, table

if TYPE_CHECKING:
    from pipelines.inspect.run_folders import RunFolder
    from pipelines.present.report.comparison import ComparedRun
    from schemas.records import Metric

app = Commands()


@app.command()
def report(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="The runs' names; by default the latest run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The report file; by default in the run's folder.")
    ] = None,
    run: RunOption = None,
    folder: RunsFolder = RUNS,
    log: Annotated[
        bool, typer.Option("--log/--no-log", help="Also read the run's log: samples, plans, the slowest trajectories.")
    ] = True,
    json: JsonOption = False,
) -> Report:
    """Write the report of a run: metrics, plots, samples, plans, slowest trajectories; or a comparison of runs.

    The report is one self-contained HTML file; of a run that has not ended it shows what there is. The log of a stopped
    run is read from its files; no broker starts.

    \b
    Examples:
      laminar report
      laminar report --run first --no-log
      laminar report first second third --out compared.html
    """
    from pipelines.inspect.run_folders import find_run

    names = [*(runs or ()), *([run] if run else ())] or [None]
    found = [find_run(folder, name) for name in names]
    if len(found) > 1:
        compared = [read_compared(each, name, folder) for each, name in zip(found, names, strict=True)]
        return _compared(compared, out or folder / "comparison.html", json)
    from infra.files import write_atomically
    from pipelines.present.report.html import render_report

    place = found[0].folder
    if log:
        for name, data in _from_log(place, names[0], folder).items():
            write_atomically(place / name, jsons.dumps(data, indent=1))
    file = out or place / REPORT_FILE
    metrics = metrics_of(found[0], names[0], folder) if log else None
    write_atomically(file, render_report(place, metrics))
    return Report({"run": found[0].run, "file": str(file)}, lambda: f"wrote {file}", as_json=json)


def _from_log(place: Path, run: str | None, folder: Path) -> dict[str, Any]:
    """Return by file name what the report shows of the run's log."""
    from pipelines.present.report.insight import insight
    from pipelines.present.report.samples import report_samples

    connection = connect(run, None, None, folder, read_only=True)
    return {
        INSIGHT_FILE: insight(connection.client, connection.run),
        SAMPLES_FILE: report_samples(connection.client, connection.run, model_of(place)),
    }


def read_compared(found: RunFolder, name: str | None, folder: Path) -> ComparedRun:
    """Return the run `found` to compare, which was named `name` (None: the latest) under `folder`."""
    from pipelines.present.report.comparison import ComparedRun
    from pipelines.present.report.summary import read_summary

    metrics = metrics_of(found, name, folder)
    return ComparedRun(name or found.run, read_summary(found.folder, metrics), metrics)


def metrics_of(found: RunFolder, name: str | None, folder: Path) -> list[Metric]:
    """Return the metrics of `found`, as `read_compared`: of its file, or of a submitted run's log."""
    from pipelines.inspect.metrics_file import read_metrics, version_metric

    if found.supervised:
        return read_metrics(found.folder / METRICS_FILE)
    from infra.kafka.topic_reader import read_topic
    from pipelines.inspect.log.manifests import Manifests
    from pipelines.inspect.run_state.refused import refused
    from schemas.records import Metric
    from schemas.topics import METRICS

    connection = connect(name, None, None, folder, read_only=True)
    written = (
        (row, record.transactional)
        for record in read_topic(connection.client, METRICS.name(connection.run))
        for row in record.rows
    )
    metrics = [row for row, by_role in written if isinstance(row, Metric) and refused(row, by_role) is None]
    return metrics + [version_metric(each) for each in Manifests(connection.client, connection.run).readable()]


def _compared(runs: list[ComparedRun], file: Path, json: bool) -> Report:
    from infra.files import write_atomically
    from pipelines.present.report.comparison import comparison, metric_rows, text_rows

    write_atomically(file, comparison(runs))
    rows = metric_rows(runs)
    columns = ["metric", *(each.run for each in runs)]
    return Report(
        {"file": str(file), "metrics": rows}, lambda: table(text_rows(runs), columns, f"{file}"), as_json=json
    )
