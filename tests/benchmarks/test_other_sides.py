"""benchmarks/other_sides.py and end_to_end.py: steps of several ranks, and figures of several sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.control import PARTS
from benchmarks.end_to_end import RECIPES, SIDES, _figure, _outside_share, _ratio
from benchmarks.measures import SETTLED_AFTER, idle_share
from benchmarks.other_sides import _joined, run_control
from benchmarks.sides import Work
from pipelines.config import load_config


def test_step_of_ranks_ends_with_the_last_and_costs_all_of_them() -> None:
    first = {"step": 3, "ended": 2.0, "cpu": 5.0, "reward": 0.5}
    second = {"step": 3, "ended": 2.5, "cpu": 4.0, "reward": 1.0}
    assert _joined([first, second]) == {"step": 3, "ended": 2.5, "cpu": 9.0, "reward": 0.75}
    assert _joined([first]) == first


CELLS = {
    "A/0/laminar": {"seconds_per_batch": 0.3, "cpu_seconds_per_batch": {"rollout-0": 0.2, "trainer": 0.1}},
    "A/0/control-1": {"seconds_per_batch": 0.6, "cpu_seconds_per_batch": {"generation": 0.15, "training": 0.05}},
    "A/1/laminar": {"seconds_per_batch": 0.3, "cpu_seconds_per_batch": {}},
}


@pytest.mark.parametrize(
    ("seed", "key", "expected"),
    [(0, "seconds_per_batch", 0.5), (0, "cpu_seconds", 1.5), (1, "seconds_per_batch", None), (1, "cpu_seconds", None)],
)
def test_ratio_of_sides_is_of_the_same_seed(seed: int, key: str, expected: float | None) -> None:
    assert _ratio(CELLS, "A", seed, "control-1", key) == pytest.approx(expected)


def test_cpu_of_a_side_is_the_sum_of_its_parts() -> None:
    assert _figure(CELLS["A/0/laminar"], "cpu_seconds") == pytest.approx(0.3)
    assert _figure({}, "seconds_per_batch") is None


def test_goals_of_recipes_are_of_sides_that_exist() -> None:
    assert {side for recipe in RECIPES.values() for side in recipe.goals} <= set(SIDES)


def test_control_counts_the_cpu_time_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"step": step, "ended": float(step), "reward": 0.5, "tokens": 60, "engine_steps": 10 * step}
        | {f"cpu/{part}": float(step) for part in PARTS}
        for step in range(1, SETTLED_AFTER + 3)
    ]

    def run(command: list[str], out: Path, threads: int) -> dict[str, object]:
        assert load_config(out / "config.toml").warm_start is None
        (out / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"threads": threads, "versions": {}, "began_at": 12.0, "started_at": 10.0}

    monkeypatch.setattr("benchmarks.other_sides._run", run)
    side = run_control(Work(tmp_path, "a-0", load_config(RECIPES["A"].example)), tmp_path, threads=1)
    assert side.cpu_seconds_per_batch == dict.fromkeys(PARTS, SETTLED_AFTER + 1.5)
    assert (side.start_up_seconds, side.steps[-1].trajectories) == (2.0, 128 * (SETTLED_AFTER + 2))
    assert side.engine == {"tokens_a_cpu_second": 60 / (SETTLED_AFTER + 2), "rows_a_step": 6.0}


def test_shares_outside_the_model_and_idle_are_of_all_processes() -> None:
    cell = {
        "cpu_seconds_per_batch": {"rollout-0": 0.2, "trainer": 0.1, "kafka": 0.1},
        "outside_model": {"trainer": 0.5},
    }
    assert _outside_share(cell) == pytest.approx(1 - 0.05 / 0.4)
    cell["outside_model"]["rollout-0"] = 0.25
    assert _outside_share(cell) == pytest.approx(1 - 0.2 / 0.4)
    assert idle_share(0.4, seconds=0.25, cores=2, others=0.05) == pytest.approx(0.15)
    assert idle_share(0.6, seconds=0.25, cores=2, others=0.0) == 0.0
