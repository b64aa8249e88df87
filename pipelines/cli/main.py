"""The command `laminar`: where its commands live, and how it ends.

Exit codes: 0 done, 1 an error or an answer that is a no (an audit that does not balance), 2 a wrong use of the command,
128 + n ended by signal n before it was done (130 Ctrl-C, 143 SIGTERM, 129 a terminal that went away). `laminar submit`
drains on Ctrl-C and SIGTERM: that is its proper end, 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import typer

from infra.escaping import escape_to_one_line
from infra.files import keep_files_private
from pipelines.cli.lazy import CommandModule, lazy_group
from pipelines.cli.light_imports import light_imports
from pipelines.present.output import show

# A module is imported when its command is called, so what is heavy stays out of what is not.
COMMANDS: dict[str, CommandModule] = {
    "run": CommandModule("pipelines.cli.run", "Train a model with all pipelines on this machine."),
    "submit": CommandModule("pipelines.cli.submit", "Run one pipeline alone, on any Beam runner."),
    "broker": CommandModule("pipelines.cli.broker", "Start, stop and look at a local Kafka that stays."),
    "runs": CommandModule("pipelines.cli.runs", "Look after runs: list, status, logs, stop, resume, audit."),
    "topics": CommandModule("pipelines.cli.topics", "Look into a run's topics: list, tail, find, lag, dead letters."),
    "trajectory": CommandModule("pipelines.cli.trajectory", "One trajectory's whole life, from the log."),
    "lineage": CommandModule("pipelines.cli.lineage", "What a weight version was made from, back to the prompts."),
    "watch": CommandModule("pipelines.cli.watch", "Watch a run as it goes, wherever it is."),
    "report": CommandModule("pipelines.cli.report", "Write a run's page, or one that compares several."),
    "metrics": CommandModule("pipelines.cli.metrics", "Serve a run's metrics to Prometheus."),
    "trace": CommandModule("pipelines.cli.trace", "Write a run's trace for Perfetto."),
    "export": CommandModule("pipelines.cli.export", "Export a topic to Parquet, Arrow or JSON lines, exactly once."),
    "import": CommandModule("pipelines.cli.import_dataset", "Feed an exported dataset to a run, as experience."),
    "train": CommandModule("pipelines.cli.train", "Train apart from a run: replay its batches."),
    "weights": CommandModule("pipelines.cli.weights", "Weight versions: list, show, verify, diff, pull, publish."),
    "relays": CommandModule("pipelines.cli.relays", "The relays of a run: their order, what they hold, what moves."),
    "replicas": CommandModule("pipelines.cli.replicas", "Look at the replicas of a run; drain one."),
    "plans": CommandModule("pipelines.cli.plans", "Show what placement has decided to move."),
    "deploy": CommandModule("pipelines.cli.deploy", "Write deployment files: compose, Kubernetes, systemd."),
    "acls": CommandModule("pipelines.cli.acls", "What each role of a run may do on Kafka, as commands."),
    "config": CommandModule("pipelines.cli.config", "Explain configuration keys; compare two configurations."),
    "doctor": CommandModule("pipelines.cli.doctor", "Say what can run on this machine, and what mends the rest."),
}
READ_ONLY = {"topics", "trajectory", "lineage", "watch", "metrics", "trace", "relays", "replicas", "plans"}
READ_ONLY |= {"weights list", "weights show"}
"""Commands that answer at once."""

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    result_callback=lambda result, **options: show(result),
)


@app.callback()
def laminar(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error. Stands anywhere."),
) -> None:
    """Reinforcement-learning post-training of language models as a dataflow on Apache Beam and Apache Kafka.

    Exit codes: 0 done; 1 an error, or an answer that is a no; 2 a wrong use; 128 + n ended by signal n (130: Ctrl-C).

    \b
    Examples:
      laminar doctor
      laminar run examples/chain_sum.toml
      laminar topics tail trajectories -n 3
      laminar runs audit
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Errors are one line on stderr; `--debug` shows where they come from."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    ours = [word for word in given[:end] if word != "--debug"]
    debug = len(ours) < end
    own = arguments is None  # a process of our own, to do with as we like
    looks = own and not READ_ONLY.isdisjoint({" ".join(ours[:1]), " ".join(ours[:2])})
    try:
        if own:
            keep_files_private()
        with light_imports() if looks else nullcontext():
            app([*ours, *given[end:]], prog_name="laminar", obj=own)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `laminar topics tail | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # the end of the line: whatever it is becomes one on stderr
        if debug:
            raise
        sys.stderr.write(f"laminar: {escape_to_one_line(_one_line(error))}\n")
        sys.exit(1)


def _one_line(error: Exception) -> str:
    text = "; ".join(str(error).split("\n"))
    expected = isinstance(error, RuntimeError | ValueError | OSError) and text
    line = text if expected else f"{type(error).__name__}: {text} (--debug shows where)"
    return "; ".join([line, *getattr(error, "__notes__", [])])
