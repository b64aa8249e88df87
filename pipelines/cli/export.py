"""`laminar export`: topics as datasets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from infra.storage import open_storage
from pipelines.cli.export_serve import serve_command
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Brokers, Connection, JsonOption, connect
from pipelines.present.output import Report

if TYPE_CHECKING:
    from operators.export.verify import Verification

FolderArgument = Annotated[
    Any,
    typer.Argument(metavar="DIR", help="The export's folder; s3://, gs://, ... for a remote one.", parser=open_storage),
]


class _TopicFirst(TyperGroup):
    """`laminar export experiences DIR` means `laminar export topic experiences DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and "--help" not in args[:1]:
            args = ["topic", *args]
        return super().parse_args(ctx, args)


app = Commands(cls=_TopicFirst, no_args_is_help=True)
app.command("serve")(serve_command)


@app.callback()
def export() -> None:
    """Export a topic to files, exactly once, and look after such exports.

    `laminar export TOPIC DIR` is `laminar export topic TOPIC DIR`.

    \b
    Examples:
      laminar export experiences data/answers
      laminar export experiences data/sft --view sft --where "task = 'chain_sum'"
      laminar export verify data/answers --log
    """


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def topic(
    context: typer.Context,
    address: Address,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A noun (experiences) or a topic's full name.")],
    folder: FolderArgument,
    format: Annotated[
        Literal["parquet", "arrow", "jsonl"], typer.Option("--format", help="What the files are.")
    ] = "parquet",
    view: Annotated[
        Literal["full", "trl", "verl", "sft", "preference"],
        typer.Option("--view", help="Every field, or what a trainer reads (of experiences)."),
    ] = "full",
    where: Annotated[
        str, typer.Option("--where", metavar="CONDITION", help="Only such rows: reward > 0.5 and task = 'gcd'.")
    ] = "",
    since_offset: Annotated[
        str | None, typer.Option("--since-offset", metavar="OFFSET", help="Begin at beginning, end, N, or -N.")
    ] = None,
    since_version: Annotated[
        int | None, typer.Option("--since-version", metavar="N", help="Only what policy version N or a later one made.")
    ] = None,
    since_time: Annotated[
        str | None, typer.Option("--since-time", metavar="TIME", help="Begin at 2026-01-31T12:00, or 2h ago.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until stopped.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="With --follow: the age at which rows get a file.")
    ] = 60.0,
    file_mb: Annotated[int, typer.Option("--file-mb", min=1, help="Size of a file's rows in memory.")] = 64,
    runner: Annotated[
        Literal["embedded", "prism", "flink", "portable"], typer.Option("--runner", help="The Beam runner.")
    ] = "embedded",
    json: JsonOption = False,
) -> Report:
    """Write a topic's rows to DIR: what had been written when it starts, or with --follow until it is stopped.

    The folder is all the state there is: the same command on it goes on where it ends, also after a kill. Where an
    export begins is fixed by its first run. Beam's own options follow after `--`.

    \b
    Examples:
      laminar export topic experiences data/answers
      laminar export experiences data/pairs --view preference --since-version 100
      laminar export settled data/outcomes --format jsonl --follow --every 10
      laminar export trajectories data/long --where "completion_tokens > 1000"
    """
    from infra.runners.run import run_pipeline
    from operators.export.card import write_card
    from operators.export.config import ExportConfig
    from operators.export.folder import ExportError, ExportFolder
    from operators.export.verify import outline
    from operators.io.shards import close_shards
    from pipelines.export import build
    from pipelines.roles import configure_logging

    to = address.connect()
    config = ExportConfig(
        folder,
        _contents(to, topic, since_offset, since_time, {"format": format, "view": view}, _both(where, since_version)),
        follow=follow,
        file_bytes=file_mb << 20,
        every_s=every,
    )
    with ExportFolder(folder, config.contents) as opened:  # refuses what cannot be before Beam is asked
        config = ExportConfig(folder, opened.contents, follow, config.file_bytes, config.every_s)
        write_card(folder)
    configure_logging()
    try:
        run_pipeline(lambda pipeline: build(pipeline, config, to.client), runner, context.args, close_shards)
    except RuntimeError as error:
        raise ExportError(str(error).partition(" [while running")[0]) from error
    write_card(folder)
    return _report(outline(folder), json, proven=False)


@app.command("verify")
def verify_(
    kafka: Brokers,
    folder: FolderArgument,
    log: Annotated[bool, typer.Option("--log", help="Read the topic as well: each file has what the log has.")] = False,
    json: JsonOption = False,
) -> Report:
    """Prove that an export has every offset once: names, manifests, hashes and rows agree. Exits with 1 if not.

    \b
    Examples:
      laminar export verify data/answers
      laminar export verify data/answers --log
    """
    from operators.export.folder import read_contents
    from operators.export.log_rows import rows_of_log
    from operators.export.verify import verify

    if not log:
        return _report(verify(folder), json)
    contents = read_contents(folder)
    to = Connection(contents.run, kafka.client()) if kafka.given else connect(contents.run, None, None)
    return _report(verify(folder, rows_of_log(to.client)), json)


@app.command("compact")
def compact_(
    folder: FolderArgument,
    file_mb: Annotated[int, typer.Option("--file-mb", min=1, help="Size of a file at most.")] = 256,
    json: JsonOption = False,
) -> Report:
    """Join small files, as an export that follows leaves them, to larger ones. Not beside those who read the folder.

    \b
    Examples:
      laminar export compact data/answers
      laminar export compact data/answers --file-mb 1024
    """
    from operators.export.card import write_card
    from operators.export.compact import compact
    from operators.export.verify import outline

    compact(folder, file_mb << 20)
    write_card(folder)
    return _report(outline(folder), json, proven=False)


def _both(where: str, since_version: int | None) -> str:
    since = "" if since_version is None else f"policy_version >= {since_version}"
    return f"({where}) and {since}" if where and since else where or since


def _contents(
    to: Connection, topic: str, offset: str | None, moment: str | None, how: Mapping[str, Any], where: str
) -> Any:
    from infra.kafka.offset_span import parse_span
    from infra.kafka.ranges import resolve_span
    from operators.export.config import Contents
    from pipelines.cli.topic_names import full_name
    from schemas.topics import run_of, run_prefix

    if offset is not None and moment is not None:
        raise typer.BadParameter("give --since-offset or --since-time, not both")
    name = full_name(topic, to.run)
    run = run_of(name) or to.run
    try:
        span = parse_span([offset or "beginning" if moment is None else f"s@{moment}"], time.time_ns() // 1_000_000)
        contents = Contents(run, name.removeprefix(run_prefix(run)), where=where, **how)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if span.last is not None:
        raise typer.BadParameter(f"{offset!r} says where to end; an export goes on", param_hint="--since-offset")
    starts = {number: held.beginning for number, held in resolve_span(to.client, name, span).items()}
    return Contents(run, contents.topic, where=where, starts=starts, **how)


def _report(proof: Verification, json: bool, proven: bool = True) -> Report:
    data = {
        "folder": proof.folder,
        "files": proof.files,
        "rows": proof.rows,
        "bytes": proof.bytes,
        "undecodable": proof.undecodable,
        "offsets": {str(partition): list(ends) for partition, ends in proof.offsets.items()},
        "compared_with_log": proof.compared,
        "problems": proof.problems,
    }
    return Report(data, lambda: _text(proof, proven), as_json=json, exit_code=1 if proof.problems else 0)


def _text(proof: Verification, proven: bool) -> str:
    ranges = ", ".join(f"{partition}: {first} to {end - 1}" for partition, (first, end) in proof.offsets.items())
    lines = [f"{proof.folder}: {proof.rows:,} rows in {proof.files} files, {proof.bytes / 1e6:,.1f} MB"]
    lines.append(f"  offsets by partition  {ranges}")
    if proof.undecodable:
        lines.append(f"  {proof.undecodable} records could not be decoded; the manifests say which, and why")
    if proof.problems:
        return "\n".join([*lines, *(f"  WRONG: {problem}" for problem in proof.problems)])
    if not proven:
        return "\n".join(lines)
    against = ", and its rows are the log's" if proof.compared else ""
    return "\n".join([*lines, f"  No offset is missing and none is there twice{against}."])
