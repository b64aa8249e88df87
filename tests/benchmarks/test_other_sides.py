"""benchmarks/other_sides.py and end_to_end.py: steps of several ranks, and figures of several sides."""

from __future__ import annotations

import argparse
import io
import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.control import ENGINE, PARTS, read_steps, train
from benchmarks.end_to_end import (
    RECIPES,
    SIDES,
    _cell,
    _figure,
    _goals,
    _limit,
    _measure,
    _outside_share,
    _print,
    _ratio,
)
from benchmarks.end_to_end import _options as parse
from benchmarks.measures import SETTLED_AFTER, idle_share
from benchmarks.other_sides import SECONDS_A_BATCH, _joined, run_control, write_questions
from benchmarks.processes import OthersWatch
from benchmarks.recipe import Loop, make_start, numbered_questions
from benchmarks.sides import MODEL_CPU, PROCESS_CPU, Side, Work, _outside_model
from pipelines.config import ConfigError, load_config
from pipelines.present.report.series import Batch
from schemas.records import Metric


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


TINY = [
    "warm_start.model.hidden_size=16", "warm_start.model.layers=1", "warm_start.model.heads=2",
    "warm_start.model.kv_heads=1", "warm_start.model.mlp_size=16", "warm_start.examples=32", "warm_start.steps=2",
    "warm_start.habit_steps=0", "warm_start.measured=2", "prompts.samples_per_prompt=2", "experience.global_batch=8",
    "prompts.max_new_tokens=4", f"trainer.optimizer_steps={SETTLED_AFTER + 2}",
]  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Recipe B with a tiny model."""
    folder = tmp_path_factory.mktemp("work")
    return Work(folder, "b-0", load_config(RECIPES["B"].example, [*TINY, f'run.folder="{folder}"']))


@pytest.fixture(scope="module")
def model(work: Work) -> Path:
    return make_start(work.config, work.folder / "warm-starts").folder


@pytest.fixture(scope="module")
def control(work: Work, model: Path) -> Side:
    """The control of `work`, in this process."""

    def run(command: list[str], out: Path, threads: int) -> dict[str, object]:
        train(load_config(out / "config.toml"), model, out)
        return {**json.loads((out / "result.json").read_text()), "started_at": 0.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.other_sides._run", run)
        return run_control(work, model, threads=1)


def test_control_counts_the_cpu_time_of_each_part(work: Work, control: Side) -> None:
    lines = read_steps(work.folder / "b-0-control-1/steps.jsonl")
    parts = control.cpu_seconds_per_batch
    assert (len(lines), tuple(parts)) == (SETTLED_AFTER + 2, PARTS)
    assert all(0 < seconds < 10 for seconds in parts.values())
    assert [step.trajectories for step in control.steps] == [8 * number for number in range(1, SETTLED_AFTER + 3)]
    assert 0 < control.steps[0].ended < control.steps[1].ended


def test_engine_of_the_control_is_counted_like_that_of_a_run(work: Work, control: Side) -> None:
    """Its CPU time is that of engine steps alone, without questions, prompts and results."""
    settled = read_steps(work.folder / "b-0-control-1/steps.jsonl")[SETTLED_AFTER:]
    seconds = sum(line[ENGINE] for line in settled)
    assert 0 < seconds < sum(line["cpu/generation"] for line in settled)
    assert control.engine == {
        "tokens_a_cpu_second": sum(line["tokens"] for line in settled) / seconds,
        "rows_a_step": sum(line["tokens"] for line in settled) / sum(line["engine_steps"] for line in settled),
        SECONDS_A_BATCH: seconds / len(settled),
    }
    assert 1 < control.engine["rows_a_step"] <= 8


def test_sides_train_the_same_questions_in_order(work: Work, model: Path, control: Side) -> None:
    """Also where held-out questions would be many of a small number."""
    assert work.config.prompts.heldout, "the examples hold questions out"
    write_questions(work.training(model), model, work.folder / "questions.jsonl")
    trl = [line["reference"]["question"] for line in read_steps(work.folder / "questions.jsonl")]
    asked = numbered_questions(load_config(work.folder / "b-0-control-1/config.toml").prompts)
    assert [next(asked).reference["question"] for _ in trl] == trl
    assert len(trl) == 4 * (SETTLED_AFTER + 2)


@pytest.mark.parametrize(
    ("control", "goals"), [((0.3, 0.1), [0.65, 0.55]), ((0.2, 0.1), [0.65, 0.625]), ((0.2, 0.16), [1.0, 1.0])]
)
def test_goal_beside_the_loop_is_not_below_the_limit(control: tuple[float, float], goals: list[float]) -> None:
    seconds, slower = control
    cell = {"mean_seconds_per_batch": seconds, "cpu_seconds_per_batch": {"training": 0.05}}
    cells = {"A/0/control-1": cell | {"engine": {SECONDS_A_BATCH: slower}}}
    assert _limit("A", cells) == (slower, "engine")
    assert _goals("A", "control-1", cells) == pytest.approx(goals)
    assert _goals("A", "trl-2", cells) == [0.42, 0.36]


def test_loop_has_the_engine_settings_of_the_run(work: Work, model: Path) -> None:
    settings = {"speculation": "true", "context": "32", "kv_capacity": "96", "slots": "4", "dtype": '"bfloat16"'}
    changes = [*TINY, *(f"rollout.{name}={value}" for name, value in settings.items())]
    engine = Loop(load_config(RECIPES["B"].example, changes), model, work.folder).engine
    assert (engine.context, engine.status().kv_capacity, engine.slots) == (32, 96, 4)
    assert engine.model.dtype is torch.bfloat16
    assert engine._speculator is not None


def test_shares_outside_the_model_are_of_each_process() -> None:
    """Counters begin at 0 in each: those of two are not subtracted from each other."""

    def metric(name: str, number: int, at: int, model_s: float, process_s: float) -> Metric:
        return Metric(name, number, {MODEL_CPU: model_s, PROCESS_CPU: process_s}, at)

    metrics = [
        metric("rollout", 0, 90, 0.0, 0.0),  # before the steps that count
        metric("rollout", 0, 100, 50.0, 60.0),
        metric("rollout", 1, 110, 1.0, 2.0),
        metric("trainer", 5, 120, 10.0, 10.0),
        metric("rollout", 0, 190, 58.0, 70.0),
        metric("rollout", 1, 200, 5.0, 12.0),
        metric("trainer", 9, 200, 13.0, 14.0),
        metric("rollout", 2, 200, 5.0, 12.0),  # its only one
    ]
    settled = [Batch(5, 100, 128, 640, {}), Batch(9, 200, 128, 1152, {})]
    assert _outside_model(metrics, settled) == pytest.approx({"rollout-0": 0.2, "rollout-1": 0.6, "trainer": 0.25})


@pytest.mark.parametrize("change", ["prompts.stop=['#']", "prompts.template='Compute {prompt}'"])
def test_sides_refuse_prompts_that_only_a_run_has(change: str, work: Work, tmp_path: Path) -> None:
    changed = replace(work, config=load_config(RECIPES["B"].example, [*TINY, change]))
    with pytest.raises(RuntimeError, match=change.partition("=")[0]):
        run_control(changed, tmp_path, threads=1)


@pytest.mark.parametrize("change", ["prompts.top_p=0.9", "prompts.top_k=5"])
def test_truncated_sampling_is_refused_for_all_sides(change: str) -> None:
    """So no side needs these settings: 1 and 0 are the only values."""
    with pytest.raises(ConfigError, match=change.partition("=")[0].removeprefix("prompts.")):
        load_config(RECIPES["B"].example, [change])


def options(folder: Path, *more: str) -> argparse.Namespace:
    files = ["--results", str(folder / "found.json"), "--folder", str(folder)]
    return parse(["--recipes", "B", "--seeds", "0", "--sides", "laminar", "control-1", *files, *more])


def test_printed_shares_are_there_for_measured_sides(work: Work, control: Side, tmp_path: Path) -> None:
    laminar = replace(
        control,
        cpu_seconds_per_batch={"rollout-0": 0.02, "trainer": 0.02, "kafka": 0.01},
        outside_model={"rollout-0": 0.5, "trainer": 0.25},
    )
    sides = {"laminar": laminar, "control-1": control}
    cells = {f"B/0/{name}": _cell(side, RECIPES["B"], work.config) | {"others": 0.0} for name, side in sides.items()}
    console = Console(width=200, record=True, file=io.StringIO())
    _print(cells, options(tmp_path), console)
    printed = console.export_text()
    for line in (
        "limit, the slower side's model time of the loop's batches: 0.",
        "times this limit",
        "share of Laminar's CPU time outside model code: 50%",
        "share of the cores that is idle",
        "tokens a CPU second in engine steps",
    ):
        assert line in printed


def test_cells_of_other_code_or_cores_are_measured_again(
    tmp_path: Path, control: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def run(work: Work, model: Path) -> Side:
        measured.append(work.name)
        return control

    monkeypatch.setattr("benchmarks.end_to_end.SIDES", {"laminar": run, "control-1": run})
    monkeypatch.setattr("benchmarks.end_to_end.warm_start", lambda work: tmp_path)
    cells: dict[str, object] = {}

    def count(*more: str) -> int:
        before = len(measured)
        _measure("B", 0, options(tmp_path, *more), cells, Console(file=io.StringIO()))
        return len(measured) - before

    assert [count(), count(), count("--cores", "1"), count("--cores", "1"), count()] == [2, 0, 2, 0, 2]
    monkeypatch.setattr("benchmarks.end_to_end.code_hash", lambda *paths: "other")
    assert count() == 2


def test_shares_outside_the_model_and_idle_are_of_all_processes() -> None:
    cell = {
        "cpu_seconds_per_batch": {"rollout-0": 0.2, "trainer": 0.1, "kafka": 0.1},
        "outside_model": {"trainer": 0.5},
    }
    assert _outside_share(cell) == pytest.approx(1 - 0.05 / 0.4)
    cell["outside_model"]["rollout-0"] = 0.25
    assert _outside_share(cell) == pytest.approx(1 - 0.2 / 0.4)
    cell["cpu_seconds_per_batch"]["rollout-1"] = 0.1
    cell["outside_model"]["rollout-1"] = 0.0
    assert _outside_share(cell) == pytest.approx(1 - 0.3 / 0.5)
    assert idle_share(0.4, seconds=0.25, cores=2, others=0.05) == pytest.approx(0.15)
    assert idle_share(0.6, seconds=0.25, cores=2, others=0.0) == 0.0


def test_other_work_is_counted_on_the_cores_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine has more: what others do there takes nothing from a side."""
    times = namedtuple("times", ("user", "idle"))
    now = [times(0.0, 0.0), times(0.0, 0.0)]
    monkeypatch.setattr("benchmarks.processes.psutil.cpu_times", lambda percpu: list(now))
    monkeypatch.setattr("benchmarks.processes.os.sched_getaffinity", lambda pid: {1})
    monkeypatch.setattr("benchmarks.processes._own_seconds", lambda: 0.0)
    others = OthersWatch()
    now[:] = times(10.0, 0.0), times(2.0, 6.0)
    assert others.share() == 0.25
