"""Experiment trackers: TensorBoard, trackio, wandb and MLflow. Each is an extra and is imported only if configured.

A record of series `trainer` at step 3 is logged as `trainer/reward/mean`, … at step 3. Trackers have no labels:
their names end with the values of labels (`experience/reward/mean/sums`). An error of a tracker disables that tracker
and does not stop the run.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pipelines.config import ConfigError
from pipelines.distribution import install_extra
from pipelines.inspect.metrics_file import LAG, PHASE, POSITION, REPLICA, UNREADABLE, Sink
from pipelines.run_config import TrackerName
from schemas.metric_labels import split_labels
from schemas.records import Metric
from schemas.topics import PAUSE, STEP_COUNTERS

log = logging.getLogger(__name__)

INTERNAL = {LAG, PHASE, POSITION, REPLICA, UNREADABLE, PAUSE}
"""Series that trackers do not get, besides counters of steps: their `step` is not an optimizer step."""
_INVALID_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)
_MAX_BATCH = 1000
"""MLflow's limits: characters that names must not contain, and values per call."""
PACKAGES: Mapping[TrackerName, str] = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}


def _logged_name(metric: Metric, key: str) -> str:
    name, labels = split_labels(key)
    return "/".join((metric.name, name, *labels.values()))


class TensorBoard:
    """Event files in `folder`/tensorboard."""

    def __init__(self, package: Any, run: str, folder: Path) -> None:
        self._writer = package.SummaryWriter(str(folder / "tensorboard"))

    def append(self, metrics: Iterable[Metric]) -> None:
        """Write scalars."""
        for metric in metrics:
            for name, value in metric.values.items():
                self._writer.add_scalar(_logged_name(metric, name), value, metric.step, metric.measured_at / 1000)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Dashboard:
    """trackio and wandb, which have the same API. Each series has its own steps, logged as `<series>/step`."""

    def __init__(self, package: Any, run: str, folder: Path) -> None:
        options = {"dir": str(folder)} if package.__name__ == "wandb" else {}
        self._run = package.init(project="laminar", name=run, **options)

    def append(self, metrics: Iterable[Metric]) -> None:
        """Log each record."""
        for metric in metrics:
            values = {_logged_name(metric, name): value for name, value in metric.values.items()}
            self._run.log({**values, f"{metric.name}/step": metric.step})

    def close(self) -> None:
        """Send the remaining values."""
        self._run.finish()


class MLflow:
    """A run of the experiment `laminar`, at MLFLOW_TRACKING_URI or else in `folder`/mlflow.db."""

    def __init__(self, package: Any, run: str, folder: Path) -> None:
        uri, local = os.environ.get("MLFLOW_TRACKING_URI"), folder.resolve()
        self._package, self._client = package, package.MlflowClient(tracking_uri=uri or f"sqlite:///{local}/mlflow.db")
        known = self._client.get_experiment_by_name("laminar")
        artifacts = None if uri else (local / "mlflow").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment("laminar", artifacts)
        self._run = self._client.create_run(experiment, run_name=run).info.run_id

    def append(self, metrics: Iterable[Metric]) -> None:
        """Log all records in as few calls as possible."""
        kind = self._package.entities.Metric
        values = [
            kind(_INVALID_IN_NAMES.sub("_", _logged_name(metric, name)), value, metric.measured_at, metric.step)
            for metric in metrics
            for name, value in metric.values.items()
        ]
        for first in range(0, len(values), _MAX_BATCH):
            self._client.log_batch(self._run, metrics=values[first : first + _MAX_BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class Sinks:
    """Several sinks as one. The run's own file must work; a tracker that fails is disabled from then on."""

    def __init__(self, file: Sink, trackers: Mapping[str, Sink]) -> None:
        self._file, self._trackers = file, dict(trackers)

    def append(self, metrics: Iterable[Metric]) -> None:
        """Append `metrics` to all sinks. Raises the errors of the file."""
        listed = list(metrics)
        self._file.append(listed)
        logged = [each for each in listed if each.name not in INTERNAL and not each.name.startswith(STEP_COUNTERS)]
        if logged:
            self._each(lambda tracker: tracker.append(logged))

    def close(self) -> None:
        try:
            self._each(lambda tracker: tracker.close())
        finally:
            self._file.close()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception:
                log.exception("tracker %s failed; it is disabled for the rest of this run", name)
                del self._trackers[name]


_CLASSES: Mapping[TrackerName, Callable[[Any, str, Path], Sink]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Dashboard,
    "wandb": Dashboard,
}


def open_trackers(names: Sequence[TrackerName], run: str, folder: Path) -> dict[str, Sink]:
    """Open the trackers `names` of run `run`, whose folder is `folder`; log and omit those that fail to open.

    Raises ConfigError if a package is missing.
    """
    packages = {name: _package(name) for name in dict.fromkeys(names)}
    opened: dict[str, Sink] = {}
    for name, package in packages.items():
        try:
            opened[name] = _CLASSES[name](package, run, folder)
        except Exception:
            log.exception("tracker %s cannot be opened; it is disabled for this run", name)
    return opened


def _package(name: TrackerName) -> Any:
    try:
        return import_module(PACKAGES[name])
    except ImportError as error:
        missing = f"the package {PACKAGES[name]}, which cannot be imported ({error})"
        raise ConfigError(f"run.trackers: {name} needs {missing}: {install_extra(name)}") from error
