"""`laminar train`: training apart from a run, from what a run has left in its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import RUNS, Brokers, JsonOption, connect
from pipelines.present.output import Report, table

if TYPE_CHECKING:
    from infra.kafka.properties import ClientProperties
    from operators.trainer.replay import Update
    from pipelines.config import Config

app = Commands(no_args_is_help=True)
SHOWN = ("step", "reward/mean", "loss", "grad_norm", "importance_ratio/mean", "ess", "entropy")
SECTION = "trainer."


@app.callback()
def train() -> None:
    """Train apart from a run.

    \b
    Examples:
      laminar train replay latest
      laminar train replay first --set trainer.learner.algorithm.name=cispo
    """


@app.command()
def replay(
    kafka: Brokers,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or `latest`.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="trainer.KEY=VALUE", help="Change the trainer's configuration; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="A new folder for model and metrics; by default beside the run's."),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where the runs are.")] = RUNS,
    json: JsonOption = False,
) -> Report:
    """Train again from a run's batches topic, from its first model, with another algorithm or rate if asked.

    After `laminar runs trim` it begins with the checkpoint that the trim point keeps.

    Without a change the weights come out bit by bit as the run left them, however often its trainer was killed; the
    answer says whether they did, and the exit code is 1 if they did not. Rewards are those of the recorded answers:
    a changed trainer learns from experience that another policy made.

    \b
    Examples:
      laminar train replay latest
      laminar train replay first --set trainer.learner.algorithm.name=cispo --set trainer.learner.learning_rate=1e-4
      laminar train replay first --out /tmp/again --json | jq .weights
    """
    from infra.models.weights import weights_digest
    from operators.trainer.ranks import Ranks
    from operators.trainer.replay import Replay, folder_digest, forked_ranks
    from pipelines.inspect.audit.trim_points import newest_trim_point

    task = _task(folder, run, changes or [], out)
    to = connect(None if run == "latest" else run, kafka.brokers, kafka.command_config, folder)
    trim_point = newest_trim_point(to.client, task.config.run.name)
    begin = None if trim_point is None else task.run_folder / trim_point.checkpoint
    began = time.monotonic()
    task.out.mkdir(parents=True)
    passed_over: dict[int, int] = {}

    def train(ranks: Ranks, tell: Callable[[Iterator[Update]], Iterator[Update]] = iter) -> tuple[list[Update], str]:
        config = task.config
        replayed = Replay(config.trainer, config.model_folder(), task.recorded, ranks, config.experience.shards, begin)
        log = _Log(to.client, task.config.run.name)
        updates = list(tell(replayed.train(log.parts(), task.steps)))
        passed_over[ranks.rank] = log.undecodable + replayed.rejected
        weights = replayed.weights()
        if ranks.rank == 0:
            replayed.save(weights, task.out / "model")
        return updates, weights_digest(weights)

    with TemporaryDirectory() as meeting, forked_ranks(task.config.trainer, train, Path(meeting)) as first:
        updates, weights = train(first, lambda found: _told(found, task))
    own = task.run_folder / "model"
    data = {
        "run": task.config.run.name,
        "changes": list(changes or []),
        "begins_at": None if trim_point is None else str(trim_point.version),
        "steps": updates[-1].step if updates else 0,
        "skipped": {update.batch: update.reason for update in updates if update.reason is not None},
        "records_passed_over": passed_over[0],
        "seconds": round(time.monotonic() - began, 3),
        "weights": weights,
        "weights_of_run": folder_digest(own) if own.is_dir() else None,
        "model": str(task.out / "model"),
        "metrics": str(task.out / "metrics.jsonl"),
    }
    differs = not changes and data["weights_of_run"] not in (None, data["weights"])
    return Report(data, lambda: _text(data, updates), as_json=json, exit_code=int(differs))


@dataclass(frozen=True)
class _Task:
    config: Config
    steps: int | None
    """Batches to train; None: all there are."""
    run_folder: Path
    out: Path
    recorded: int
    """Ranks that the batches were made for."""


def _task(folder: Path, run: str, changes: list[str], out: Path | None) -> _Task:
    """What is to be trained again, and where it goes. Raises typer.BadParameter."""
    from pipelines.config import load_config

    place = (folder / run).resolve()
    if not (place / "config.toml").is_file():
        raise typer.BadParameter(f"there is no run {run!r} under {folder}/", param_hint="RUN")
    for change in changes:
        if not change.startswith(SECTION):
            raise typer.BadParameter(f"{change!r}: only {SECTION}* can change in a replay", param_hint="--set")
    config = load_config(place / "config.toml", changes)
    limited = not changes or any(change.startswith("trainer.optimizer_steps") for change in changes)
    if out is None:
        out = next(name for name in (place / f"replay-{number}" for number in count(1)) if not name.exists())
    if out.exists():
        raise typer.BadParameter(f"{out} is there already", param_hint="--out")
    recorded = load_config(place / "config.toml").trainer.ranks
    if config.trainer.ranks not in (1, recorded):
        raise typer.BadParameter(
            f"its batches are for {recorded} ranks: trainer.ranks can be that or 1", param_hint="--set"
        )
    return _Task(config, config.trainer.optimizer_steps if limited else None, place, out, recorded)


@dataclass
class _Log:
    """The batches of `run`. `undecodable` counts records that are no micro-batches: the trainer passed over them."""

    client: ClientProperties
    run: str
    undecodable: int = 0

    def parts(self) -> Iterator[tuple[Any, int, int]]:
        """The micro-batches with partition and offset."""
        from infra.kafka.reading import read_topic
        from schemas.records import MicroBatch
        from schemas.topics import BATCHES

        for record in read_topic(self.client, BATCHES.name(self.run)):
            if record.error is None and all(isinstance(row, MicroBatch) for row in record.rows):
                yield from ((row, record.partition, record.offset) for row in record.rows)
            else:
                self.undecodable += 1


def _told(updates: Iterator[Update], task: _Task) -> Iterator[Update]:
    """`updates` as they come, each written to the metrics file and shown to whoever watches a terminal."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pipelines.inspect.metrics_file import MetricsFile
    from pipelines.present.view.console import console
    from schemas.records import Metric

    reward = TextColumn("{task.fields[reward]}")
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), reward)
    with MetricsFile(task.out / "metrics.jsonl") as file, Progress(*columns, console=console(stderr=True)) as progress:
        shown = progress.add_task(f"replaying {task.config.run.name}", total=task.steps, reward="")
        for update in updates:
            if update.reason is None:
                file.append([Metric("trainer", update.step, update.values, time.time_ns() // 10**6)])
                progress.update(shown, completed=update.step, reward=f"reward {update.values['reward/mean']:.3f}")
            yield update


def _text(data: dict[str, Any], updates: list[Update]) -> Any:
    from rich.console import Group

    trained = [update for update in updates if update.reason is None]
    picked = trained if len(trained) <= 10 else [trained[i * (len(trained) - 1) // 9] for i in range(10)]
    rows = [{"step": update.step, **{name: _short(update.values.get(name)) for name in SHOWN[1:]}} for update in picked]
    lines = [f"{data['steps']} steps in {data['seconds']:.1f} s; the model is in {data['model']}"]
    lines += [f"batch {batch} was passed over: {reason}" for batch, reason in data["skipped"].items()]
    if data["records_passed_over"]:
        lines.append(
            f"{data['records_passed_over']} records were passed over, as in the run: `laminar topics dead-letters`"
        )
    if data["begins_at"]:
        lines.append(f"the log begins at version {data['begins_at']}: so did this, with the checkpoint that was kept")
    if data["weights_of_run"] is None:
        lines.append("the run has left no model to compare with")
    elif not data["changes"]:
        same = data["weights"] == data["weights_of_run"]
        lines.append("the weights are the run's own, bit by bit" if same else "THE WEIGHTS ARE NOT THE RUN'S")
    return Group(table(rows, SHOWN), *lines)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
