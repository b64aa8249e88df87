"""benchmarks/paper.py: its tables, and that results of other code do not count. The predictions are invented."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper
from benchmarks.paper import MODELS, SCALES, SCHEDULES, Point, cluster_of, trainer_rate

Main = Callable[..., str]


def invented(point: Point, part: int, seed: int, steps: int) -> dict[str, Any]:
    """Laminar is twice as fast as the others, and faster with a larger share for the trainer."""
    rate = (2000.0 if point.schedule == "laminar" else 1000.0) * (1 + point.train_share)
    shares = dict.fromkeys(("kv_use", "rollout_idle", "trainer_idle"), 0.5)
    times = {"trajectories_per_cpu_s": 10.0, "speed": 100.0}
    staleness = {
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "finish_staleness": [0.25, 0.5, 0.25],
        "kv_cycle": [0.1, 0.9],
    }
    return {"tokens_per_s": rate, **shares, **times, **staleness}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Main:
    """What the command prints with these arguments."""
    monkeypatch.setattr(paper, "predict", invented)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["paper.py", "--results", str(tmp_path / "paper.json"), *arguments])
        paper.main()
        return capsys.readouterr().out

    return run


def test_paper_prints_speed_ups_and_staleness(main: Main) -> None:
    output = main("--models", "32B", "--scales", "small")
    assert "over synchronous: mean 2.00, most 2.00 (paper, of all scales: 2.56, 5.49)" in output
    assert "staleness at the finish, 32B 32 laminar: mean 1.00; 0: 25 %, 1: 50 %, 2: 25 %" in output
    assert "KV use in tenths of a version's time, 32B 32 laminar: 10 90 %" in output


def test_paper_prints_means_over_all_scales(main: Main) -> None:
    output = main()
    assert all(f"{model} {gpus} laminar" in output for model, gpus in (("7B", 128), ("32B", 64), ("72B", 512)))
    assert "scaling efficiency of 32B: 6.2 % (paper 68.2 %)" in output  # invented: the same rate on 16 times the GPUs
    assert "scaling efficiency of all: 6.2 % (paper 53.7 %)" in output


def test_paper_prints_tool_use_by_itself(main: Main) -> None:
    output = main("--scales", "small")
    assert output.count("over stream: mean 2.00") == 2
    assert "tool use, over stream: mean 2.00, most 2.00 (paper, of all scales: 1.21 to 5.42" in output


def test_paper_does_not_show_results_of_other_code(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    main("--models", "32B", "--scales", "small")
    assert "over synchronous" in main("--models", "32B", "--scales", "small", "--known")
    monkeypatch.setattr(paper, "code_hash", lambda *paths: "other")
    assert "over synchronous" not in main("--models", "32B", "--scales", "small", "--known")


def test_72b_trains_on_as_many_gpus_as_in_the_paper() -> None:
    for schedule, trains in {
        "synchronous": [64, 128, 256, 512, 1024],
        "one_step": [32, 64, 96, 192, 256],
        "stream": [32, 64, 96, 192, 256],
        "partial_rollout": [32, 64, 128, 320, 640],
        "laminar": [32, 64, 128, 320, 768],
    }.items():
        assert [Point("72B", scale, schedule).split()[0] for scale in SCALES] == trains, schedule
    assert Point("7B", "large", "laminar").split() == (192, 64)


def test_every_point_is_a_cluster_of_all_its_gpus() -> None:
    for point in (Point(*names) for names in product(MODELS, SCALES, SCHEDULES)):
        cluster, (train, replicas) = cluster_of(point, 1, 0, 5), point.split()
        assert (cluster.gpus, cluster.train_gpus, cluster.replicas) == (point.gpus, train, replicas), point
        wanted = {"7B": 1 if point.schedule in ("laminar", "partial_rollout") else 2, "32B": 4, "72B": 8}
        assert cluster.gpus_per_replica == wanted[point.model.removesuffix("-tool")]
        assert bool(cluster.config.rollout.emulation.tools.most_calls) == (point.model == "7B-tool")


def test_prediction_of_a_point_has_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of its batch: some seconds of CPU."""
    monkeypatch.setattr(paper, "GLOBAL_BATCH", 1024)
    point = Point("7B", "small", "laminar")
    found = paper.predict(point, 4, 0, 4)
    assert invented(point, 4, 0, 4).keys() <= found.keys()
    most = trainer_rate(MODELS["7B"], point.split()[0])
    assert 0.3 * most < found["tokens_per_s"] < most
