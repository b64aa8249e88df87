"""Calibration: the emulation of a run from its metrics."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from predicted_clusters import TABLE, question, small_config

from infra.kafka.properties import ClientProperties
from pipelines.cli import cost as cost_module
from pipelines.cli.predict import overheads_of, predict_report
from pipelines.config import Config, ConfigError, load_config, parse_config, save_config
from pipelines.inspect.run_files import CONFIG_FILE, METRICS_FILE
from pipelines.simulate.prediction import measured_overheads as overheads_module
from pipelines.simulate.prediction.calibration import calibrate, calibrated, lengths_of
from pipelines.simulate.prediction.cluster import Overheads
from pipelines.simulate.prediction.engine_speed import decode_line, engine_intervals
from pipelines.simulate.prediction.measured_overheads import measured_overheads
from schemas.plain import encode_json
from schemas.records import Metric
from schemas.topics import EXPERIENCES, SETTLED, Topic


def test_lengths_have_the_mean_and_the_longest_of_the_run() -> None:
    found = lengths_of(mean=300.0, longest=1400.0, drawn=100)
    assert found.p50 < 300 < found.p99 < 1400
    assert lengths_of(mean=5.0, longest=5.0, drawn=10).p50 == pytest.approx(5.0)


def metrics_of_a_run() -> list[Metric]:
    """Five steps of 1,280 tokens in 2 s, and a replica that runs 8 requests at 10 ms a step, half of the time."""
    step = {
        "time/update": 2.0,
        "response_length/mean": 30.0,
        "response_length/max": 60.0,
        "batch/trajectories": 32.0,
        "batch/tokens": 1280.0,
        "weight_sync/seconds": 0.1,
    }
    beat = {"incarnation": 1.0, "running": 8.0, "capacity": 24.0, "kv_capacity": 3000.0}
    beats = [Metric("replica", 0, {**beat, "tokens_generated": 800.0 * n}, 1000 * n) for n in range(1, 5)]
    return [
        *beats,
        *engine_metrics([(0.5, 50.0, 400.0)] * 4),
        *(Metric("trainer", n, dict(step), 2000 * n) for n in range(1, 6)),
    ]


def engine_metrics(intervals: list[tuple[float, float, float]], process: int = 0) -> list[Metric]:
    """The metrics of a process, each second, whose engine has worked for so many seconds, steps and tokens."""
    sums = [tuple(map(sum, zip((0.0, 0.0, 0.0), *intervals[:n], strict=True))) for n in range(len(intervals) + 1)]
    names = ("rollout/busy_seconds", "rollout/steps", "rollout/tokens")
    return [Metric("rollout", process, dict(zip(names, each, strict=True)), 1000 * n) for n, each in enumerate(sums)]


def run_folder(folder: Path, metrics: list[Metric], **changes: Any) -> Path:
    """The folder of a run that was not emulated."""
    settings = {"rollout__engine": "transformers", "prompts__max_new_tokens": 100, **changes}
    save_config(small_config(**settings), folder / CONFIG_FILE)
    (folder / METRICS_FILE).write_bytes(b"".join(encode_json(each) + b"\n" for each in metrics))
    return folder


def test_calibration_takes_engine_trainer_and_lengths_of_a_run(tmp_path: Path) -> None:
    found = calibrate(run_folder(tmp_path, metrics_of_a_run()))
    assert found.emulated
    assert found.prompts.prompt_tokens == 10
    assert found.trainer.emulation.seconds(1280) == pytest.approx(2.0)
    assert dict(found.rollout.emulation.roofline.decode_ms)[8] == pytest.approx(10.0)
    assert found.trainer.emulation.deviation == 0.0
    assert found.rollout.emulation.lengths.p50 < 30 < found.rollout.emulation.lengths.p99


@pytest.mark.parametrize(
    ("batches", "expected"),
    [([8, 8, 8], [10, 10]), ([2, 8, 32], [3, 34]), ([32, 2, 30, 3], [3, 34]), ([4, 4, 4, 64], [3, 66])],
)
def test_engine_speed_is_a_line_over_the_batch(batches: list[int], expected: list[float]) -> None:
    """Of an engine whose steps take 2 ms and 1 ms for each request; it generates for a part of the time."""
    intervals = [(100 * (2 + batch) / 1000, 100.0, 100.0 * batch) for batch in batches]
    found = decode_line(list(engine_intervals(engine_metrics(intervals))))
    assert [milliseconds for _, milliseconds in found] == pytest.approx(expected)
    assert found[1][0] == max(batches)


def test_engine_speed_has_no_interval_across_a_restart() -> None:
    metrics = [*engine_metrics([(0.5, 50.0, 400.0)] * 3), *engine_metrics([(0.1, 10.0, 80.0)], process=1)]
    restarted = [replace(each, measured_at=each.measured_at + 3100) for each in metrics[:4]]
    ordered = sorted([*metrics, *restarted], key=lambda each: each.measured_at)
    assert [each.seconds for each in engine_intervals(ordered)] == pytest.approx([0.5] * 6 + [0.1])


UNSET = {"rollout__slots": None, "rollout__kv_capacity": None}


@pytest.mark.parametrize(
    ("changes", "slots", "kv_capacity"),
    [
        ({}, 16, 4096),
        ({**UNSET, "rollout__speculation": True}, 24, None),
        (
            {
                **UNSET,
                "rollout__engine": "vllm",
                "rollout__tensor_parallel": 2,
                "rollout__vllm": {"enforce_eager": True},
                "rollout__environments": [{"name": "guess"}],
                "trainer__ranks": 4,
                "trainer__shard_ranks": 2,
                "trainer__context_ranks": 2,
                "gateway__port": 8000,
            },
            24,
            3000,
        ),
    ],
)
def test_calibration_takes_runs_of_every_engine_and_of_ranks(
    tmp_path: Path, changes: dict[str, Any], slots: int, kv_capacity: int | None
) -> None:
    folder = run_folder(tmp_path, metrics_of_a_run(), **changes)
    rollout = question(run=folder).cluster().config.rollout
    assert (rollout.slots, rollout.kv_capacity, rollout.speculation) == (slots, kv_capacity, False)


def test_calibration_takes_steps_whose_fixed_time_rounds_below_0(tmp_path: Path) -> None:
    """3.9 s - 3.9 s / 1,280 × 1,280 is negative in floating point."""
    metrics = [
        replace(each, values={**each.values, "time/update": 3.9}) if each.name == "trainer" else each
        for each in metrics_of_a_run()
    ]
    assert calibrate(run_folder(tmp_path, metrics)).trainer.emulation.step_s[0] == (0.0, 0.0)


def test_calibration_takes_the_deviation_of_steps(tmp_path: Path) -> None:
    metrics = metrics_of_a_run()
    for step, seconds in zip(metrics[-4:], (1.0, 3.0, 1.0, 3.0), strict=True):
        step.values["time/update"] = seconds
    assert calibrate(run_folder(tmp_path, metrics)).trainer.emulation.deviation == pytest.approx(0.5)


def test_calibration_rejects_a_run_with_too_few_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 optimizer steps: at least 3 are needed"):
        calibrate(run_folder(tmp_path, metrics_of_a_run()[:-4]))


def config_of_tasks(*samples: int, engine: str = "transformers") -> Config:
    """A configuration with a task for each number of samples, and rewards of each."""
    names = [f"task{number}" for number in range(len(samples))]
    rewards = {"answer": "whole", "rewards": [{"name": "length", "options": {"target": 1, "limit": 9}}]}
    return parse_config(
        {
            **TABLE,
            "rollout": {**TABLE["rollout"], "engine": engine},
            "model": {"path": "model"} if engine == "transformers" else {},
            "prompts": {
                "max_new_tokens": 100,
                "tasks": [
                    {"name": name, "task": "gcd", "samples_per_prompt": each}
                    for name, each in zip(names, samples, strict=True)
                ],
            },
            "score": {"tasks": [{"name": name, **rewards} for name in names]},
        },
        "a test",
    )


def test_calibration_takes_the_mixture_of_several_tasks(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, metrics_of_a_run())
    save_config(config_of_tasks(4, 4), folder / CONFIG_FILE)
    assert question(run=folder).cluster().config.prompts.max_new_tokens == 100
    save_config(load_config(folder / CONFIG_FILE, ["trainer.ranks=2"]), folder / CONFIG_FILE)
    assert question(run=folder, train_gpus=None).cluster().train_gpus == 2
    data = cost_module.cost(calibrate=folder, changes=["trainer.optimizer_steps=4"], json=True).data
    assert (data["trajectories"], data["prompt_tokens"]) == (32, 10)
    save_config(config_of_tasks(4, 8), folder / CONFIG_FILE)
    with pytest.raises(ConfigError, match="samples_per_prompt of 4, 8: runs whose groups differ in size are not"):
        calibrate(folder)


def test_unpredictable_configurations_are_rejected_at_once(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    for config, error in (
        (config_of_tasks(4, 4), "let the run generate for some minutes and give its folder: --calibrate runs/NAME$"),
        (config_of_tasks(4, 8), "neither from their configuration nor by --calibrate"),
        (small_config(prompts__tasks=[{"name": name, "source": "synthetic"} for name in "ab"]), "remove prompts.tasks"),
    ):
        save_config(config, file)
        with pytest.raises(ConfigError, match=error):
            cost_module.cost(file)


def test_calibration_rejects_a_run_with_an_environment(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, metrics_of_a_run())
    config = load_config(folder / "config.toml", ["prompts={task='gcd', environment='guess'}"])
    with pytest.raises(ConfigError, match=r"turns and waits of environments \(guess\) are not predicted$"):
        calibrated(config, metrics_of_a_run(), "first")


def test_calibration_reports_how_many_steps_it_needs(tmp_path: Path) -> None:
    metrics = metrics_of_a_run()
    for measured, expected in (([], r"has 0 intervals .* about 20 opt"), (metrics[4:6], r"has 1 .* about 20 opt")):
        with pytest.raises(ConfigError, match=expected):
            calibrate(run_folder(tmp_path, [*measured, *metrics[-5:]]))


def test_calibrated_run_is_predicted_with_its_settings(tmp_path: Path) -> None:
    run = run_folder(tmp_path, metrics_of_a_run())
    report = predict_report(
        question(run=run, changes=["trainer.optimizer_steps=4"]), search=False, plot=None, json=True
    )
    assert 2.0 <= report.data["iteration_s"] < 4.0
    assert "trained tokens/s" in report.text()


Rows = dict[Topic, list[dict[str, Any]]]


def log_of(lags: list[tuple[float, float]], waits: list[float]) -> tuple[Rows, list[Metric]]:
    """The rows and the trainer's metrics of a run: of each batch the seconds from its last score to its choice and
    from there to its training, and how long the trainer has waited."""
    rows: Rows = {EXPERIENCES: [], SETTLED: []}
    metrics = []
    for batch, ((hop, lag), waited) in enumerate(zip(lags, waits, strict=True)):
        at = datetime.fromtimestamp(1000.0 + 10 * batch, UTC)
        for n in range(10):
            name, scored_at = f"p{batch}.{n}", at - timedelta(seconds=hop + 0.01 * n)
            rows[EXPERIENCES].append({"trajectory_id": name, "scored_at": scored_at})
            rows[SETTLED].append({"trajectory_id": name, "outcome": "batched", "batch": batch, "settled_at": at})
        rows[EXPERIENCES].append({"trajectory_id": f"dropped-{batch}", "scored_at": at})
        rows[SETTLED].append(
            {"trajectory_id": f"dropped-{batch}", "outcome": "dropped", "batch": None, "settled_at": at}
        )
        values = {"time/wait": waited, "time/update": 2.0, "weight_sync/seconds": 0.5}
        metrics.append(Metric("trainer", batch + 1, values, round(1000 * (1000.0 + 10 * batch + lag + 2.5))))
    return rows, metrics


def test_overheads_are_those_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, metrics = log_of([(0.2, 0.3), (0.1, 0.4), (0.1, 0.5), (0.1, 9.0)], [1.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(overheads_module, "rows_of", lambda client, run, topic, columns: rows[topic])
    found = measured_overheads(ClientProperties.at("nowhere:1"), "r", metrics)
    assert found is not None
    assert found.hop_s == pytest.approx(0.1)
    assert found.batch_s == pytest.approx(0.4)  # the trainer was busy when the last batch was chosen
    assert measured_overheads(ClientProperties.at("nowhere:1"), "r", metrics[:2]) is None


def test_run_without_a_log_has_the_default_overheads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overheads_of(run_folder(tmp_path, metrics_of_a_run())) == Overheads()
    assert "Between roles 0.1 s and 0.4 s a batch are assumed" in capsys.readouterr().err
