"""The command `laminar`: its subcommands and its exit codes.

Exit codes: 0 success; 1 an error, or the check failed (an audit that found a lost trajectory); 2 invalid usage; 128 + n
terminated by signal n (130 Ctrl-C, 143 SIGTERM, 129 a closed terminal). `laminar submit` drains on Ctrl-C and SIGTERM
and then exits with 0.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import TracebackType

import typer

from infra.escaping import escape_control_characters, escape_to_one_line, print_escaped
from infra.files import keep_files_private
from infra.quiet_libraries import quiet_libraries
from infra.runners.garbage_collection import collect_rarely, skip_collections_of_exit
from infra.terminal import print_wrapped
from pipelines import distribution
from pipelines.cli.lazy import CommandModule, lazy_group, light_imports
from pipelines.cli.option_sets import Commands
from pipelines.present.output import show

# A module is imported when its command is called, so that light commands do not import heavy packages.
COMMANDS: dict[str, CommandModule] = {
    "run": CommandModule("pipelines.cli.run", "Train a model with all pipelines on this machine."),
    "submit": CommandModule("pipelines.cli.submit", "Run one pipeline alone, on any Beam runner."),
    "broker": CommandModule("pipelines.cli.broker", "Start, stop and inspect a local Kafka broker."),
    "runs": CommandModule("pipelines.cli.runs", "Manage runs: list, status, logs, stop, resume, audit."),
    "topics": CommandModule("pipelines.cli.topics", "Inspect a run's topics: list, tail, find, lag, dead letters."),
    "samples": CommandModule("pipelines.cli.samples", "Show what the model answers, with rewards; compare versions."),
    "chat": CommandModule("pipelines.cli.chat", "Talk to a weight version of a run while it trains."),
    "agents": CommandModule("pipelines.cli.agents", "Play the episodes of a run with agents on other machines."),
    "trajectory": CommandModule("pipelines.cli.trajectory", "Show a trajectory's history, from prompt to outcome."),
    "lineage": CommandModule("pipelines.cli.lineage", "Show from which prompts a weight version was trained."),
    "watch": CommandModule("pipelines.cli.watch", "Watch a run live, on this machine or another."),
    "report": CommandModule("pipelines.cli.report", "Write an HTML report of a run, or compare several runs."),
    "metrics": CommandModule("pipelines.cli.metrics", "Serve a run's metrics to Prometheus."),
    "trace": CommandModule("pipelines.cli.trace", "Write a run's trace for Perfetto."),
    "export": CommandModule("pipelines.cli.export", "Export a topic to Parquet, Arrow or JSON Lines, exactly once."),
    "import": CommandModule("pipelines.cli.import_dataset", "Import an exported dataset into a run, as experience."),
    "train": CommandModule("pipelines.cli.train", "Replay a run's training from its batches."),
    "weights": CommandModule("pipelines.cli.weights", "Weight versions: list, show, verify, diff, pull, publish."),
    "relays": CommandModule("pipelines.cli.relays", "Show a run's relays: their order, versions and transfers."),
    "replicas": CommandModule("pipelines.cli.replicas", "Show a run's replicas; drain one."),
    "autoscale": CommandModule("pipelines.cli.autoscale", "Show the autoscaler's decisions, reasons and outcomes."),
    "plans": CommandModule("pipelines.cli.plans", "Show placement's repack plans and their outcomes."),
    "deploy": CommandModule("pipelines.cli.deploy", "Write deployment files: compose, Kubernetes."),
    "acls": CommandModule("pipelines.cli.acls", "Print or create the Kafka ACLs of a run's roles."),
    "config": CommandModule("pipelines.cli.config", "Explain configuration keys; compare two configurations."),
    "simulate": CommandModule("pipelines.cli.simulate", "Play histories of failures of a run, in virtual time."),
    "cost": CommandModule("pipelines.cli.cost", "Predict GPU hours and Kafka bytes of an optimizer step."),
    "doctor": CommandModule("pipelines.cli.doctor", "Check what can run on this machine, and how to fix the rest."),
}
READ_ONLY = {"topics", "samples", "trajectory", "lineage", "watch", "metrics", "trace", "relays", "replicas", "plans"}
READ_ONLY |= {"weights list", "weights show", "autoscale"}
"""The read-only commands, which start with `light_imports`."""
FULL_IMPORTS = {"topics create", "topics reset"}
"""Commands of a read-only group that need the whole configuration."""

app = Commands(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    result_callback=lambda result, **options: show(result),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_escaped(f"laminar {distribution.version()}")
        raise typer.Exit


@app.callback()
def laminar(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error. Valid at any position."),
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Reinforcement-learning post-training of language models as a dataflow on Apache Beam and Apache Kafka.

    Exit codes: 0 success; 1 an error, or the check failed; 2 invalid usage; 128 + n ended by signal n (130: Ctrl-C).

    \b
    Examples:
      laminar doctor
      laminar run examples/chain_sum.toml
      laminar topics tail trajectories -n 3
      laminar runs audit
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. An error is one line on stderr, and its details; on a terminal they are wrapped.

    `--debug` shows its traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    before_dashes = [word for word in given[:end] if word != "--debug"]
    debug = len(before_dashes) < end
    own_process = arguments is None
    group, command = (" ".join(before_dashes[:words]) for words in (1, 2))
    read_only = own_process and command not in FULL_IMPORTS and not READ_ONLY.isdisjoint({group, command})
    try:
        if own_process:
            _print_all_text()
            collect_rarely()
            skip_collections_of_exit()
            keep_files_private()
            quiet_libraries()
            sys.excepthook = _print_traceback
        with light_imports() if read_only else nullcontext():
            app([*before_dashes, *given[end:]], prog_name="laminar", obj=own_process)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `laminar topics tail | head`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # every error becomes one line on stderr, with its details below
        if debug:
            raise
        head = f"laminar: {escape_to_one_line(_one_line(error))}"
        print_wrapped("\n  ".join([head, *getattr(error, "detail_lines", ())]), err=True)
        sys.exit(1)


def _print_all_text() -> None:
    """Let the standard streams take all text: also what their encoding lacks, and with nobody to read it (`>&-`).

    A terminal shows "?", one column wide, for such a character, and a file or pipe gets its number.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # it looks for the position of a file, which may have been replaced by a terminal
                stream.reconfigure(errors="replace" if stream.isatty() else "backslashreplace")


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(escape_control_characters("".join(traceback.format_exception(kind, error, trace))))


def _one_line(error: Exception) -> str:
    text = "; ".join(_text(error).split("\n"))
    expected = isinstance(error, RuntimeError | ValueError | OSError) and text
    if _is_lost_connection(error):
        return (
            f"Kafka no longer responds ({text}). While a run's own broker starts or stops, try again in a moment; "
            "otherwise check that Kafka runs"
        )
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    line = text if expected else f"{named} (use --debug for the traceback)"
    return "; ".join([line, *getattr(error, "__notes__", [])])


def _is_lost_connection(error: Exception) -> bool:
    """Whether a request of the Kafka client has failed because no broker responded."""
    errors = sys.modules.get("kafka.errors")  # not imported: many commands need no Kafka
    names = ("KafkaConnectionError", "KafkaTimeoutError", "NodeNotReadyError", "MetadataEmptyBrokerList")
    return errors is not None and isinstance(error, tuple(getattr(errors, name) for name in names))


def _text(error: Exception) -> str:
    """Return the text of an error; of one of the operating system: its file and its meaning, without the number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    files = " → ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    return f"{files}: {error.strerror}" if files else error.strerror
