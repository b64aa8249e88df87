"""`laminar export`: export a run's topics as datasets, or serve them over Arrow Flight."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from infra.clocks import wall_ms
from infra.counted import counted
from infra.runners.options import RunnerName
from infra.storage import open_storage
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import (
    Address,
    ExportedRun,
    FollowOption,
    JsonOption,
    ModelOption,
    RunClient,
    TransactionalAddress,
)
from pipelines.cli.trajectory import model_of
from pipelines.present.output import Report
from pipelines.present.progress import ProgressPrinter, print_error_line
from pipelines.present.token_colours import has_tokenizer

if TYPE_CHECKING:
    from infra.kafka.properties import ClientProperties
    from operators.export.config import ExportConfig
    from operators.export.verify import Verification
import signal
import threading
from pathlib import Path

from infra.escaping import print_escaped
from infra.listening import is_loopback

FolderArgument = Annotated[
    Any,
    typer.Argument(
        metavar="DIR", help="The export's folder, local or remote (s3://, gs://, ...).", parser=open_storage
    ),
]


class _TopicFirst(TyperGroup):
    """Reads `laminar export experiences DIR` as `laminar export topic experiences DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and "--help" not in args[:1]:
            args = ["topic", *args]
        return super().parse_args(ctx, args)


app = Commands(cls=_TopicFirst, no_args_is_help=True)


@app.callback()
def export() -> None:
    """Export a topic to files, exactly once; verify, compact and serve exports.

    `laminar export TOPIC DIR` is short for `laminar export topic TOPIC DIR`.

    \b
    Examples:
      laminar export experiences data/answers
      laminar export experiences data/sft --view sft --where "task = 'chain_sum'"
      laminar export verify data/answers --log
    """


@app.command()
def serve(
    address: Address,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free port.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Require the token in FILE; needed beyond this machine."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="The TLS certificate (PEM); needs --key.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="The certificate's key (PEM).")] = None,
    model: ModelOption = None,
) -> None:
    """Serve a run's topics over Arrow Flight until Ctrl-C. Clients can read while records are written, and not write.

    A ticket is JSON: {"topic": "experiences", "where": "reward > 0.5", "from": "-100", "follow": true}.

    \b
    Examples:
      laminar export serve --port 8815
      laminar export serve --host 0.0.0.0 --port 8815 --token-file token --certificate me.pem --key me.key
      python -c "import pyarrow.flight as f; c = f.connect('grpc://127.0.0.1:8815'); print(*c.list_flights())"
    """
    if not is_loopback(host) and (token_file is None or certificate is None):
        needed = "--token-file, --certificate and --key (without TLS anybody on the network can read the token)"
        raise typer.BadParameter(f"other machines can reach {host}: give {needed}", param_hint="--host")
    if (certificate is None) != (key is None):
        raise typer.BadParameter("give both options or neither", param_hint="--certificate, --key")
    from infra.files import read_secret
    from operators.export.flight import TopicServer

    token = "" if token_file is None else read_secret(token_file)
    pair = None if certificate is None or key is None else (certificate.read_bytes(), key.read_bytes())
    connection = address.open_log()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.set())
    tokenizer = _tokenizer(address, model)
    with TopicServer(connection.client, connection.run, host, port, token, pair, tokenizer) as server:
        print_escaped(f"serving run {connection.run} at {server.location}")
        stopped.wait()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def topic(
    context: typer.Context,
    address: TransactionalAddress,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A short name (experiences) or a full topic name.")],
    folder: FolderArgument,
    format: Annotated[
        Literal["parquet", "arrow", "jsonl"], typer.Option("--format", help="The file format.")
    ] = "parquet",
    view: Annotated[
        Literal["full", "trl", "verl", "sft", "preference", "conversations"],
        typer.Option(
            "--view", help="full: every field. The others: the columns that a trainer reads (experiences only)."
        ),
    ] = "full",
    split: Annotated[
        Literal["train", "test", "all"] | None,
        typer.Option(
            "--split",
            help="test: answers to held-out questions only; train: all others; default: all for full, else train.",
        ),
    ] = None,
    where: Annotated[
        str,
        typer.Option("--where", metavar="CONDITION", help="Only matching rows, e.g. reward > 0.5 and task = 'gcd'."),
    ] = "",
    since_offset: Annotated[
        str | None, typer.Option("--since-offset", metavar="OFFSET", help="Start at beginning, end, N or -N.")
    ] = None,
    since_version: Annotated[
        int | None, typer.Option("--since-version", metavar="N", help="Only rows of policy version N or later.")
    ] = None,
    since_time: Annotated[
        str | None,
        typer.Option(
            "--since-time", metavar="TIME", help="Start at a time, e.g. 2026-01-31T12:00, or 2h for two hours ago."
        ),
    ] = None,
    follow: FollowOption = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="With --follow: close a file after this time.")
    ] = 60.0,
    file_mb: Annotated[
        int, typer.Option("--file-mb", min=1, help="Close a file when its rows take this much memory.")
    ] = 64,
    runner: Annotated[RunnerName, typer.Option("--runner", help="The Beam runner.")] = "embedded",
    model: ModelOption = None,
    json: JsonOption = False,
) -> Report:
    """Write a topic's rows to DIR: all that exist when the command starts, or with --follow until it is stopped.

    DIR holds all state: the same command continues where the export ends, also after a kill. The first command fixes
    its start. Beam's own options follow `--`. Of a run that has stopped here the files of its log are read.

    \b
    Examples:
      laminar export topic experiences data/answers
      laminar export experiences data/pairs --view preference --since-version 100
      laminar export experiences data/verl-test --view verl --split test
      laminar export settled data/outcomes --format jsonl --follow --every 10
      laminar export trajectories data/long --where "completion_tokens > 1000"
    """
    from operators.export.card import write_card
    from operators.export.config import ExportConfig
    from operators.export.export_topic import export_stored, with_recorded_form
    from operators.export.folder import ExportFolder
    from operators.export.verify import check_manifests
    from operators.export.views import default_split

    address = address.pinned()
    beam = follow or runner != "embedded" or bool(context.args)
    connection = address.connect() if beam else address.open_log()
    tokenizer = _tokenizer(address, model)
    options = {"format": format, "view": view, "split": split or default_split(view), "tokenizer": tokenizer}
    contents = _contents(connection, topic, since_offset, since_time, options, _combined(where, since_version))
    contents = with_recorded_form(contents, connection.client, folder, keep_split=split is not None)
    config = ExportConfig(folder, contents, follow=follow, file_bytes=file_mb << 20, every_s=every)
    with ExportFolder(folder, config.contents) as opened:  # rejects invalid contents before Beam starts
        contents = replace(opened.contents, tokenizer=config.contents.tokenizer)
        config = replace(config, contents=contents)
        write_card(folder)
    with _progress(config, quiet=json or not sys.stderr.isatty()):
        if connection.client.log is not None:
            export_stored(config, connection.client)
        else:
            _run_pipeline(config, connection, address, runner, context.args)
    write_card(folder)
    return _report(check_manifests(folder), json, verified=False)


@app.command("verify")
def verify_(
    address: ExportedRun,
    folder: FolderArgument,
    log: Annotated[
        bool, typer.Option("--log", help="Also read the topic, and compare each file's rows with it.")
    ] = False,
    json: JsonOption = False,
) -> Report:
    """Verify that an export has every offset once: file names, manifests, hashes and rows agree. Exits with 1 if not.

    \b
    Examples:
      laminar export verify data/answers --log
      laminar export verify data/answers --log --run elsewhere/sums
    """
    from operators.export.folder import read_contents
    from operators.export.verify import ExportedLog, verify

    if not log:
        return _report(verify(folder), json)
    run = address.run or read_contents(folder).run
    client = address.client() if address.given else replace(address, run=run).open_log().client
    return _report(verify(folder, ExportedLog(client)), json)


@app.command("compact")
def compact_(
    folder: FolderArgument,
    file_mb: Annotated[int, typer.Option("--file-mb", min=1, help="Maximum size of a file.")] = 256,
    json: JsonOption = False,
) -> Report:
    """Merge the small files that an export with --follow leaves. Run it only while nobody reads the folder.

    \b
    Examples:
      laminar export compact data/answers
      laminar export compact data/answers --file-mb 1024
    """
    from operators.export.card import write_card
    from operators.export.folder import compact
    from operators.export.verify import check_manifests

    compact(folder, file_mb << 20)
    write_card(folder)
    return _report(check_manifests(folder), json, verified=False)


def _progress(config: ExportConfig, quiet: bool) -> AbstractContextManager[object]:
    """Lines of progress on standard error, while the export lasts."""
    from operators.export.folder import read_parts

    def so_far() -> str:
        if not isinstance(config.folder, Path):  # each manifest would be a request
            return ""
        return f": {sum(part.rows for part in read_parts(config.folder)):,} rows so far"

    subject = f"exports {config.contents.topic} to {config.folder}"
    return nullcontext() if quiet else ProgressPrinter(subject, only_slow=True, first_s=1.0, so_far=so_far)


@contextmanager
def _stopped_with_the_run(address: Address) -> Iterator[Callable[[], ClientProperties | None]]:
    """Stop the pipeline, whose sources would wait for minutes, once the run has ended, with its own broker; the value
    returns the run's log then, else None."""
    from infra.runners.stopping import STOPPING

    ended = threading.Event()
    found: list[ClientProperties] = []

    def watch() -> None:
        while not found and not ended.wait(0.5):
            if (log := address.stopped_log()) is not None:
                found.append(log)
                STOPPING.set()

    thread = threading.Thread(target=watch, name="watch the run", daemon=True)
    thread.start()
    try:
        yield lambda: found[0] if found else None
    finally:
        ended.set()
        thread.join()


def _run_pipeline(
    config: ExportConfig, connection: RunClient, address: Address, runner: RunnerName, options: list[str]
) -> None:
    from infra.runners.role_logging import configure_logging
    from infra.runners.run import run_pipeline
    from operators.export.export_topic import StartPositions, export_stored
    from operators.export.folder import ExportError
    from operators.io.shards import close_shards
    from pipelines.export import build

    client = connection.client
    configure_logging()
    with _stopped_with_the_run(address) as log_of_ended:
        try:
            StartPositions(config, client)()  # what the topic lacks is found at once
            graph = partial(build, config=config, client=client, transaction_timeout_s=address.transaction_timeout_s)
            run_pipeline(graph, runner, options, close_shards)
        except RuntimeError as error:
            if log_of_ended() is None:
                failed = ExportError(str(error).partition(" [while running")[0])
                failed.add_note(f"what was written to {config.folder} is valid: the same command continues the export")
                raise failed from error
            logging.getLogger(__name__).warning("the pipeline failed when the run ended: %s", error)
    if (log := log_of_ended()) is not None:
        print_error_line("the run has ended, and its broker with it: the rest is read from the files of its log")
        export_stored(config, log)


def _tokenizer(address: Address, model: Path | None) -> str:
    """The folder of the tokenizer for the texts of views; "" if this machine has none of the run's."""
    found = model or model_of(address.folder)
    if model is not None and not has_tokenizer(model):
        raise typer.BadParameter(f"{model} has no tokenizer.json", param_hint="--model")
    return str(found.absolute()) if has_tokenizer(found) else ""


def _combined(where: str, since_version: int | None) -> str:
    since = "" if since_version is None else f"policy_version >= {since_version}"
    return f"({where}) and {since}" if where and since else where or since


def _contents(
    connection: RunClient, topic: str, offset: str | None, since: str | None, options: Mapping[str, Any], where: str
) -> Any:
    from infra.kafka.offset_span import parse_span
    from infra.kafka.ranges import resolve_span
    from operators.export.config import Contents
    from pipelines.cli.topic_names import full_name
    from schemas.topics import run_of, run_prefix

    if offset is not None and since is not None:
        raise typer.BadParameter("give --since-offset or --since-time, not both")
    name = full_name(topic, connection.run)
    run = run_of(name) or connection.run
    try:
        span = parse_span([offset or "beginning" if since is None else f"s@{since}"], wall_ms())
        contents = Contents(run, name.removeprefix(run_prefix(run)), where=where, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if span.last is not None:
        raise typer.BadParameter(f"{offset!r} has an end; give only a start offset", param_hint="--since-offset")
    starts = {number: offsets.beginning for number, offsets in resolve_span(connection.client, name, span).items()}
    return Contents(run, contents.topic, where=where, starts=starts, **options)


def _report(found: Verification, json: bool, verified: bool = True) -> Report:
    data = {
        "folder": found.folder,
        "files": found.files,
        "rows": found.rows,
        "bytes": found.bytes,
        "undecodable": found.undecodable,
        "offsets": {str(partition): list(ends) for partition, ends in found.offsets.items()},
        "compared_with_log": found.compared,
        "not_compared": {str(partition): end for partition, end in found.not_compared.items()},
        "problems": found.problems,
    }
    return Report(data, lambda: _text(found, verified), as_json=json, exit_code=1 if found.problems else 0)


def _text(found: Verification, verified: bool) -> str:
    ranges = ", ".join(f"{partition}: {first} to {end - 1}" for partition, (first, end) in found.offsets.items())
    size = f"{found.bytes / 1e6:,.1f} MB" if found.bytes >= 1e5 else f"{found.bytes / 1e3:,.1f} kB"
    lines = [f"{found.folder}: {counted(found.rows, 'row')} in {counted(found.files, 'file')}, {size}"]
    lines.append(f"  offsets by partition  {ranges}")
    if not found.rows and found.conditions:
        lines.append(f"  no row satisfies: {' and '.join(f'({each})' for each in found.conditions)}")
    if found.undecodable:
        lines.append(f"  {found.undecodable} records could not be decoded; the manifests list them with the reasons")
    if found.problems:
        return "\n".join([*lines, *(f"  WRONG: {problem}" for problem in found.problems)])
    if not verified:
        return "\n".join(lines)
    for partition, end in found.not_compared.items():
        lines.append(f"  not compared          partition {partition} before {end}, since the log begins later")
    others = "the other" if found.not_compared else "the"
    compared = f", and {others} rows equal those in the log" if found.compared else ""
    return "\n".join([*lines, f"  No offset is missing or duplicated{compared}."])
