"""Trackers: the logged values of each, and trackers that fail or are not installed."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from pipelines.config import ConfigError
from pipelines.inspect.metrics_file import LAG, MetricsFile, by_topic, read_metrics
from pipelines.present.report.trackers import Sinks, open_trackers
from schemas.metric_labels import labelled
from schemas.records import Metric

FIRST = Metric("trainer", 1, {"reward/mean": 0.25, "loss": -1.0}, 1_700_000_000_000)
SECOND = Metric("evaluation", 0, {"greedy": 0.5}, 1_700_000_001_000)


def events(folder: Path) -> Iterator[tuple[str, int, float, float]]:
    """Yield tag, step, value and time of every scalar in the event files (TFRecords of Event messages)."""
    for file in folder.iterdir():
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            yield from ((v.tag, event.step, v.simple_value, event.wall_time) for v in event.summary.value)
            content = content[16 + length :]


class Package(ModuleType):
    """A fake of trackio or wandb that keeps the logged values; if `broken`, `log` raises."""

    def __init__(self, name: str, broken: bool = False) -> None:
        super().__init__(name)
        self.init_options: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.broken, self.finished = broken, False

    def init(self, **options: Any) -> Package:
        self.init_options = options
        return self

    def log(self, values: dict[str, float]) -> None:
        if self.broken:
            raise RuntimeError("no network")
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def test_tensorboard_logs_every_series(tmp_path: Path) -> None:
    sinks = Sinks(MetricsFile(tmp_path / "metrics.jsonl"), open_trackers(["tensorboard"], "first", tmp_path))
    sinks.append([FIRST, SECOND, by_topic(LAG, {"batches": 3}, 1), Metric("steps/score", 0, {"bytes": 1.0}, 1)])
    sinks.close()
    assert sorted(events(tmp_path / "tensorboard")) == [
        ("evaluation/greedy", 0, 0.5, 1_700_000_001.0),
        ("trainer/loss", 1, -1.0, 1_700_000_000.0),
        ("trainer/reward/mean", 1, 0.25, 1_700_000_000.0),
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.parametrize(("name", "more"), [("trackio", set()), ("wandb", {"dir"})])
def test_dashboard_logs_step_of_each_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, more: set[str]
) -> None:
    package = Package(name)
    monkeypatch.setitem(sys.modules, name, package)
    sinks = Sinks(MetricsFile(tmp_path / "metrics.jsonl"), open_trackers([name], "first", tmp_path))
    sinks.append([FIRST])
    sinks.close()
    assert (package.init_options["project"], package.init_options["name"]) == ("laminar", "first")
    assert set(package.init_options) == {"project", "name", *more}
    assert package.logged == [{"trainer/reward/mean": 0.25, "trainer/loss": -1.0, "trainer/step": 1}]
    assert package.finished


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_dashboard_packages_accept_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read at import
    pytest.importorskip(name, reason=f"the extra `{name}` is not installed")
    trackers = open_trackers([name], "first", tmp_path)
    for tracker in trackers.values():
        tracker.append([FIRST, SECOND])
        tracker.close()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert all(each in written for each in (b"trainer/reward/mean", b"trainer/step", b"evaluation/greedy"))


def test_mlflow_logs_values_with_step_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="`make exports-test` has it")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sinks = Sinks(MetricsFile(tmp_path / "metrics.jsonl"), open_trackers(["mlflow"], "first", tmp_path))
    odd = Metric("evaluation", 3, {labelled("accuracy/greedy", task="1 + 1?"): 0.5}, 1_700_000_002_000)
    many = [Metric("many", step, {f"n{n}": step + n for n in range(11)}, 0) for step in range(100)]
    sinks.append([FIRST, odd, *many])
    sinks.append([SECOND])
    sinks.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("laminar")
    assert experiment.artifact_location == (tmp_path / "mlflow").as_uri()
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")

    def history_of(name: str) -> list[tuple[int, int, float]]:
        return [(each.step, each.timestamp, each.value) for each in client.get_metric_history(run.info.run_id, name)]

    assert history_of("trainer/reward/mean") == [(1, 1_700_000_000_000, 0.25)]
    assert history_of("evaluation/greedy") == [(0, 1_700_000_001_000, 0.5)]
    assert history_of("evaluation/accuracy/greedy/1 _ 1_") == [(3, 1_700_000_002_000, 0.5)]
    assert sorted(history_of("many/n10")) == [(step, 0, step + 10.0) for step in range(100)]


def test_open_trackers_omits_tracker_that_fails_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    assert open_trackers(["wandb"], "first", tmp_path) == {}
    assert [record.message for record in caplog.records] == [
        "tracker wandb cannot be opened; it is disabled for this run"
    ]


def test_sinks_disable_failing_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Package("wandb", broken=True))
    sinks = Sinks(MetricsFile(tmp_path / "metrics.jsonl"), open_trackers(["wandb"], "first", tmp_path))
    sinks.append([FIRST])
    sinks.append([SECOND])
    sinks.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [FIRST, SECOND]
    assert [record.message for record in caplog.records] == [
        "tracker wandb failed; it is disabled for the rest of this run"
    ]


def test_open_trackers_names_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"trackio needs the package trackio, .*pip install '.\[trackio\]'"):
        open_trackers(["trackio"], "first", tmp_path)
