"""Trackers that people look at elsewhere: TensorBoard, trackio, wandb, MLflow, each an extra, imported when asked.

A record of series `trainer` at step 3 goes to them as `trainer/reward/mean`, … at step 3. What a tracker raises ends
the tracker, not the run.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pipelines.config import ConfigError, TrackerName
from pipelines.inspect.metrics_file import LAG, PHASE, POSITION, REPLICA, UNREADABLE, Sink
from schemas.records import Metric

log = logging.getLogger(__name__)

OWN = {LAG, PHASE, POSITION, REPLICA, UNREADABLE}
"""Series whose step is no step: they are for our own eyes."""
_UNFIT = re.compile(r"[^\w\-. :/]", re.ASCII)
_AT_ONCE = 1000
"""What MLflow has in no name, and how many values it takes in a call."""
PACKAGES: Mapping[TrackerName, str] = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}


class TensorBoard:
    """Event files in `folder`/tensorboard."""

    def __init__(self, package: Any, run: str, folder: Path) -> None:
        self._writer = package.SummaryWriter(str(folder / "tensorboard"))

    def append(self, metrics: Iterable[Metric]) -> None:
        """Write scalars."""
        for metric in metrics:
            for name, value in metric.values.items():
                self._writer.add_scalar(f"{metric.name}/{name}", value, metric.step, metric.measured_at / 1000)

    def close(self) -> None:
        """Let the file go."""
        self._writer.close()


class Dashboard:
    """trackio and wandb, whose calls are alike. Series have steps of their own, which go along as `<series>/step`."""

    def __init__(self, package: Any, run: str, folder: Path) -> None:
        self._run = package.init(project="laminar", name=run, **_where(package, folder))

    def append(self, metrics: Iterable[Metric]) -> None:
        """Log each record."""
        for metric in metrics:
            values = {f"{metric.name}/{name}": value for name, value in metric.values.items()}
            self._run.log({**values, f"{metric.name}/step": metric.step})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class MLflow:
    """A run of the experiment `laminar`, where MLFLOW_TRACKING_URI says, else in `folder`/mlflow.db."""

    def __init__(self, package: Any, run: str, folder: Path) -> None:
        uri, kept = os.environ.get("MLFLOW_TRACKING_URI"), folder.resolve()
        self._package, self._client = package, package.MlflowClient(tracking_uri=uri or f"sqlite:///{kept}/mlflow.db")
        known = self._client.get_experiment_by_name("laminar")
        artifacts = None if uri else (kept / "mlflow").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment("laminar", artifacts)
        self._run = self._client.create_run(experiment, run_name=run).info.run_id

    def append(self, metrics: Iterable[Metric]) -> None:
        """Log each record, in as few calls as may be."""
        kind = self._package.entities.Metric
        values = [
            kind(_UNFIT.sub("_", f"{metric.name}/{name}"), value, metric.measured_at, metric.step)
            for metric in metrics
            for name, value in metric.values.items()
        ]
        for first in range(0, len(values), _AT_ONCE):
            self._client.log_batch(self._run, metrics=values[first : first + _AT_ONCE])

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._run)


class Sinks:
    """Several sinks as one. The first is the run's own file and must work; another that fails is left out from then."""

    def __init__(self, file: Sink, trackers: Mapping[str, Sink]) -> None:
        self._file, self._trackers = file, dict(trackers)

    def append(self, metrics: Iterable[Metric]) -> None:
        """Give `metrics` to all. Raises what the file raises."""
        listed = list(metrics)
        self._file.append(listed)
        shown = [metric for metric in listed if metric.name not in OWN]
        if shown:
            self._each(lambda tracker: tracker.append(shown))

    def close(self) -> None:
        """Close all."""
        try:
            self._each(lambda tracker: tracker.close())
        finally:
            self._file.close()

    def _each(self, what: Callable[[Sink], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                what(tracker)
            except Exception:
                log.exception("tracker %s failed and hears no more of this run", name)
                del self._trackers[name]


_KINDS: Mapping[TrackerName, Callable[[Any, str, Path], Sink]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Dashboard,
    "wandb": Dashboard,
}


def open_trackers(names: Sequence[TrackerName], run: str, folder: Path) -> dict[str, Sink]:
    """The trackers `names` of run `run`, whose folder is `folder`, but for those that cannot be opened.

    Raises ConfigError where a package is missing.
    """
    packages = {name: _package(name) for name in dict.fromkeys(names)}
    opened: dict[str, Sink] = {}
    for name, package in packages.items():
        try:
            opened[name] = _KINDS[name](package, run, folder)
        except Exception:
            log.exception("tracker %s cannot be opened and hears nothing of this run", name)
    return opened


def _package(name: TrackerName) -> Any:
    try:
        return import_module(PACKAGES[name])
    except ImportError as error:
        needed = f"{PACKAGES[name]}, which cannot be imported ({error})"
        raise ConfigError(f"run.trackers: {name} needs {needed}: pip install 'laminar-rl[{name}]'") from error


def _where(package: Any, folder: Path) -> dict[str, str]:
    return {"dir": str(folder)} if package.__name__ == "wandb" else {}
