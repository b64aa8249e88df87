"""`laminar train`: replay the training of a run from its batches topic, and plan its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.clocks import wall_ms
from infra.counted import counted
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Brokers, JsonOption, RunsFolder, connect
from pipelines.inspect.run_files import METRICS_FILE
from pipelines.inspect.run_folders import RUNS, config_file, folder_of, run_command
from pipelines.present.output import Report, table

if TYPE_CHECKING:
    from operators.trainer.checkpoint_files import RankLayout
    from operators.trainer.replay import Update
    from pipelines.config import Config

app = Commands(no_args_is_help=True)
COLUMNS = ("step", "reward/mean", "loss", "grad_norm", "importance_ratio/mean", "ess", "entropy")
SECTION = "trainer."
RANKS = ("trainer.ranks", "trainer.shard_ranks", "trainer.context_ranks")
MOST_ROWS = 20


@app.callback()
def train() -> None:
    """Replay the training of a run, or compute the memory that training needs.

    \b
    Examples:
      laminar train replay latest
      laminar train replay first --set trainer.learner.algorithm.name=cispo
      laminar train memory
    """


@app.command()
def memory(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A run's configuration; without it, the documented set-ups."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A model folder; by default the configuration's.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="trainer.KEY=VALUE", help="Change the configuration; may be repeated."),
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Compute the memory that a trainer rank needs for a model, by purpose, in 10^9 bytes.

    Only the model's config and the headers of its weight files are read. Without CONFIG the table has the set-ups of
    docs/training.md: nodes of 8 GPUs of 80 GB, bfloat16, gradient checkpointing, 16,384 tokens a micro-batch. A second
    table has what a GPU of their rollouts needs, a third one how long a version's parts from other machines take.

    \b
    Examples:
      laminar train memory
      laminar train memory config.toml --model models/Qwen2.5-7B --set trainer.ranks=4
      laminar train memory --json | jq .rows
    """
    if config is None and (model is not None or changes):
        raise typer.BadParameter("the documented set-ups are fixed: give CONFIG, too", param_hint="CONFIG")
    if config is not None:
        rows = [_model_row(config, model, changes or [])]
        return Report({"rows": rows}, lambda: _memory_table(rows), as_json=json)
    data = _target_rows()
    return Report(data, lambda: _memory_tables(data), as_json=json)


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
        typer.Option(
            "--out", metavar="DIR", help="A new folder for model and metrics; by default in the run's folder."
        ),
    ] = None,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Train again from a run's batches topic and initial model, with another algorithm or learning rate if set.

    After `laminar runs trim` the replay begins with the checkpoint that the trim point keeps.

    Without --set the weights equal the run's bit by bit, however often its trainer was killed or its ranks changed. The
    command compares them, and exits with 1 if they differ. With --set the trainer learns from recorded responses and
    rewards, that is, from experience that another policy generated; the command prints how far the weights are from the
    run's. The replay ends with the step with which the run ended, unless trainer.optimizer_steps is set.

    \b
    Examples:
      laminar train replay latest
      laminar train replay first --set trainer.learner.algorithm.name=cispo --set trainer.learner.learning_rate=1e-4
      laminar train replay first --out /tmp/again --json | jq .weights
    """
    from operators.trainer.replay import folder_digest, folder_distance
    from pipelines.inspect.audit.trim_points import newest_trim_point
    from pipelines.inspect.replayed_training import TrainingReplay

    task = _task(folder, run, changes or [], out)
    latest = task.config.run.name if kafka.given else None
    connection = connect(
        latest if run == "latest" else run, kafka.brokers, kafka.command_config, folder, read_only=True
    )
    trim_point = newest_trim_point(connection.client, task.config.run.name)
    started = time.monotonic()
    task.out.mkdir(parents=True)
    updates, skipped_records, weights = TrainingReplay(
        task.config,
        connection.client,
        task.layouts,
        task.steps,
        task.out / "model",
        lambda found: _logged(found, task),
        begin=0 if trim_point is None else trim_point.version.number,
        checkpoint=None if trim_point is None else task.run_folder / trim_point.checkpoint,
    ).run()
    own = task.run_folder / "model"
    run_weights = folder_digest(own) if own.is_dir() else None
    compared = changes and run_weights is not None
    data = {
        "run": task.config.run.name,
        "changes": list(changes or []),
        "start_version": None if trim_point is None else str(trim_point.version),
        "steps": updates[-1].step if updates else 0,
        "skipped_batches": {update.batch: update.reason for update in updates if update.reason is not None},
        "skipped_records": skipped_records,
        "seconds": round(time.monotonic() - started, 3),
        "weights": weights,
        "run_weights": run_weights,
        "weight_distance": folder_distance(task.out / "model", own) if compared else None,
        "model": str(task.out / "model"),
        "metrics": str(task.out / METRICS_FILE),
    }
    differs = not changes and data["run_weights"] not in (None, data["weights"])
    return Report(data, lambda: _text(data, updates, task.run_folder), as_json=json, exit_code=int(differs))


@dataclass(frozen=True)
class _Task:
    config: Config
    steps: int
    """Batches to train at most."""
    run_folder: Path
    out: Path
    layouts: Sequence[RankLayout]
    """The ranks that train, one after the other."""


def _task(folder: Path, run: str, changes: list[str], out: Path | None) -> _Task:
    """Return the run to replay and the output folder. Raises typer.BadParameter."""
    from pipelines.config import load_config

    place = folder_of(folder, None if run == "latest" else run).resolve()
    if (file := config_file(place)) is None:
        raise typer.BadParameter(f"there is no run {run!r} under {folder}/", param_hint="RUN")
    for change in changes:
        if not change.startswith(SECTION):
            raise typer.BadParameter(f"{change!r}: a replay can change only {SECTION}* settings", param_hint="--set")
    shares = load_config(file).trainer.shares
    alone = ["trainer.shard_ranks=0", "trainer.context_ranks=1"] if "trainer.ranks=1" in changes else []
    config = load_config(file, [f"trainer.batch_shares={shares}", *changes, *alone])
    if config.trainer.shares != shares:
        raise typer.BadParameter(f"the run's batches have {shares} shares, which a replay keeps", param_hint="--set")
    steps = config.trainer.optimizer_steps
    if not any(change.startswith("trainer.optimizer_steps") for change in changes):
        steps = min(steps, _last_step(place) or steps)
    if out is None:
        out = next(name for name in (place / f"replay-{number}" for number in count(1)) if not name.exists())
    if out.exists():
        raise typer.BadParameter(f"{out} exists already", param_hint="--out")
    named = any(change.partition("=")[0] in RANKS for change in changes)
    return _Task(config, steps, place, out, _layouts(config, as_recorded=not named))


def _layouts(config: Config, *, as_recorded: bool) -> Sequence[RankLayout]:
    """The ranks of `config` or, `as_recorded`, those that the newest checkpoint of its run names."""
    from operators.trainer.checkpoint import find_checkpoints, read_position
    from operators.trainer.rank_layouts import layout_of
    from pipelines.training_step import checkpoints_of

    checkpoints = find_checkpoints(checkpoints_of(config)) if as_recorded else []
    return (read_position(checkpoints[-1]).layouts if checkpoints else ()) or (layout_of(config.trainer),)


def _last_step(run_folder: Path) -> int | None:
    """The last optimizer step of the run; None if its folder does not have its metrics."""
    from pipelines.inspect.metrics_file import read_metrics

    metrics = read_metrics(run_folder / METRICS_FILE)
    return max((metric.step for metric in metrics if metric.name == "trainer"), default=None)


def _logged(updates: Iterator[Update], task: _Task) -> Iterator[Update]:
    """Yield `updates`; write each to the metrics file and show it on the terminal."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from operators.trainer.metrics import finite
    from pipelines.inspect.metrics_file import MetricsFile
    from pipelines.present.view.console import console
    from schemas.records import Metric

    reward = TextColumn("{task.fields[reward]}")
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), reward)
    with MetricsFile(task.out / METRICS_FILE) as file, Progress(*columns, console=console(stderr=True)) as progress:
        bar = progress.add_task(f"replaying {task.config.run.name}", total=task.steps, reward="")
        for update in updates:
            if update.reason is None:
                file.append([Metric("trainer", update.step, finite(update.values), wall_ms())])
                progress.update(bar, completed=update.step, reward=f"reward {update.values['reward/mean']:.3f}")
            yield update


def _text(data: dict[str, Any], updates: Sequence[Update], folder: Path) -> Any:
    from rich.console import Group

    trained = [update for update in updates if update.reason is None]
    few = len(trained) <= MOST_ROWS
    sample = trained if few else [trained[i * (len(trained) - 1) // (MOST_ROWS - 1)] for i in range(MOST_ROWS)]
    rows = [
        {"step": update.step, **{name: _short(update.values.get(name)) for name in COLUMNS[1:]}} for update in sample
    ]
    lines = [] if few else [f"(shown: {MOST_ROWS} of {len(trained)} steps)"]
    lines += [f"{counted(data['steps'], 'step')} in {data['seconds']:.1f} s; the model is in {data['model']}"]
    lines += [f"skipped batch {batch}: {reason}" for batch, reason in data["skipped_batches"].items()]
    if data["skipped_records"]:
        see = run_command(folder, "topics dlq list")
        lines.append(f"skipped {data['skipped_records']} records, as the run did: see `{see}`")
    if data["start_version"]:
        lines.append(f"the log begins at version {data['start_version']}; the replay began with that checkpoint")
    if data["run_weights"] is None:
        lines.append("the run has no final model to compare with")
    elif not data["changes"]:
        same = data["weights"] == data["run_weights"]
        lines.append("the weights equal the run's, bit by bit" if same else "THE WEIGHTS DIFFER FROM THE RUN'S")
    else:
        distance = f"{100 * data['weight_distance']:.3g} % of the norm of the run's weights"
        lines.append(f"the weights differ from the run's by {distance} (norm of the difference)")
        lines.append("rewards are the run's: the replay trains its recorded responses and generates none")
    return Group(table(rows, COLUMNS), *lines)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


GB = 10**9
TITLES = {
    "rows": "a rank of the trainer",
    "rollouts": "a GPU of a rollout, beside vLLM's activations",
    "publication": "parts of a version from other machines than rank 0's, beside the next update",
}


def _target_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of the set-ups' ranks, and of their rollouts."""
    from operators.trainer.memory_plan import REMOTE_BYTES_PER_S, TARGETS
    from pipelines.setups import rollout_row

    ranks = [
        {"model": each.model, "nodes": each.nodes, "ranks": each.ranks, **_gigabytes(each.plan().parts)}
        for each in TARGETS
    ]
    sent = [
        {"model": each.model, "remote": each.ranks - each.ranks // each.nodes, "sent": each.remote_bytes / GB}
        | {f"s at {speed / GB:.2f} GB/s": round(each.remote_bytes / speed) for speed in REMOTE_BYTES_PER_S}
        for each in TARGETS
    ]
    return {"rows": ranks, "rollouts": [rollout_row(each) for each in TARGETS], "publication": sent}


def _memory_tables(data: dict[str, list[dict[str, Any]]]) -> Any:
    from rich.console import Group

    ranks, *others = (_memory_table(data[name], title) for name, title in TITLES.items())
    return Group(ranks, *(part for each in others for part in ("", each)))


def _memory_table(rows: list[dict[str, Any]], title: str = "") -> Any:
    shown = [
        {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]
    return table(shown, tuple(rows[0]), title)


def _model_row(file: Path, model: Path | None, changes: list[str]) -> dict[str, Any]:
    from operators.trainer.memory_plan import plan_rank, shape_of
    from pipelines.config import load_config
    from pipelines.sequence_lengths import longest_sequence

    config = load_config(file, changes)
    folder = config.model_folder() if model is None else model
    try:
        plan = plan_rank(shape_of(folder), config.trainer, longest_sequence(config))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"the model in {folder}: {error}") from error
    return {"model": folder.name, "ranks": config.trainer.ranks, **_gigabytes(plan.parts)}


def _gigabytes(parts: Mapping[str, int]) -> dict[str, float]:
    """The `parts` and their sum, in 10^9 bytes."""
    return {name: size / GB for name, size in parts.items()} | {"total": sum(parts.values()) / GB}
