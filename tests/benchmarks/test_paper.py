"""benchmarks/paper.py: its tables, and that results of other code do not count. The predictions are invented."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper
from benchmarks.paper import MODELS, Point

Main = Callable[..., str]


def invented(point: Point, part: int, seed: int, steps: int) -> dict[str, Any]:
    """Laminar is twice as fast as the others, and faster with a larger share for the trainer."""
    rate = (2000.0 if point.schedule == "laminar" else 1000.0) * (1 + point.train_share)
    shares = dict.fromkeys(("kv_use", "rollout_idle", "trainer_idle"), 0.5)
    times = {"trajectories_per_cpu_s": 10.0, "speed": 100.0}
    staleness = {"staleness_mean": 1.0, "staleness_max": 2, "finish_staleness": [0.25, 0.5, 0.25]}
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
    assert "over synchronous: mean 2.00, most 2.00 (paper 2.56, 5.49)" in output
    assert "staleness at the finish, 32B 32 laminar: mean 1.00; 0: 25 %, 1: 50 %, 2: 25 %" in output


def test_paper_compares_with_the_papers_split_alone(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "+81.2 %" in main("--beyond")  # 13/16 for the trainer
    others = [(name, point) for name, point in paper.beyond() if name != paper.PAPERS_SPLIT]
    monkeypatch.setattr(paper, "beyond", lambda: iter(others))
    assert "+0.0 %" not in main("--beyond", "--known")


def test_paper_does_not_show_results_of_other_code(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    main("--models", "32B", "--scales", "small")
    assert "over synchronous" in main("--models", "32B", "--scales", "small", "--known")
    monkeypatch.setattr(paper, "code_hash", lambda *paths: "other")
    assert "over synchronous" not in main("--models", "32B", "--scales", "small", "--known")


def test_points_have_whole_replicas() -> None:
    for model in MODELS:
        train, replicas = Point(model, "small", "laminar").split()
        assert train + replicas * MODELS[model].tensor_parallel == Point(model, "small", "laminar").gpus
