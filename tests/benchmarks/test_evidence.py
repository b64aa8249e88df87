"""The evidence benchmark: its arms on a tiny model, its curriculum, pass@k and its verdict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import ARMS, config_of, failed, key_of, measure_seed, results_of, show
from benchmarks.evidence_arms import Answers, Levels, pass_at, sample
from benchmarks.recipe import Loop
from benchmarks.results import Result, Results
from operators.prompts.question import Question

TINY = [
    "warm_start.model.hidden_size=16", "warm_start.model.layers=1", "warm_start.model.heads=2",
    "warm_start.model.kv_heads=1", "warm_start.model.mlp_size=16", "warm_start.examples=32", "warm_start.steps=2",
    "warm_start.measured=2", "prompts.heldout=4", "prompts.samples_per_prompt=2", "experience.global_batch=4",
    "trainer.optimizer_steps=2", "prompts.max_new_tokens=4",
]  # fmt: skip


def with_different_rewards(loop: Loop, questions: Sequence[Question], seed: int) -> Answers:
    """Answers whose rewards are 0, 1, 2, ..."""
    answers = sample(loop, questions, seed)
    return replace(answers, rewards=[float(number) for number in range(len(answers.rewards))])


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        config=Path("examples/curriculum.toml"), set=TINY, folder=tmp_path, questions=2, samples=8
    )


def test_evidence_measures_every_arm_once(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.evidence.ROUNDS", 2)
    monkeypatch.setattr("benchmarks.evidence_arms.TRIAL_STEPS", 1)
    packed: list[tuple[int, list[float]]] = []
    pack = Loop.pack

    def recorded(loop: Loop, step: int, references: Any, completions: Any, rewards: Sequence[float]) -> Any:
        packed.append((step, list(rewards)))
        return pack(loop, step, references, completions, rewards)

    monkeypatch.setattr(Loop, "pack", recorded)
    monkeypatch.setattr("benchmarks.evidence_arms.sample", with_different_rewards)
    done = Results(options.folder / "evidence.json")
    measure_seed(0, options, done)
    results = results_of(0, options, done)
    assert list(results) == list(ARMS)
    given, shuffled = packed[:2], packed[2:]
    assert [step for step, _ in given] == [step for step, _ in shuffled] == [0, 1]
    for (_, one), (_, other) in zip(given, shuffled, strict=True):
        assert one == sorted(one) == sorted(other) != other, "the control trains the same rewards in another order"
    assert set(results["warm start"]["pass"]) == {"1", "8"}
    assert results["shuffled"]["levels"] == results["reinforcement"]["levels"] == [0, 0]
    measured = capsys.readouterr().err
    measure_seed(0, options, Results(options.folder / "evidence.json"))
    assert measured
    assert not capsys.readouterr().err, "a saved result is not measured again"
    show({0: results}, options.config)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ARMS.values())


def test_evidence_keys_differ_by_settings_that_matter(options: argparse.Namespace) -> None:
    config = config_of(0, options)
    other = replace(config, trainer=replace(config.trainer, optimizer_steps=3))
    assert key_of("reinforcement", config, options) != key_of("reinforcement", other, options)
    assert key_of("reinforcement", config, options) != key_of("reinforcement", config_of(1, options), options)


def test_levels_rise_by_the_rule_of_the_sampler(options: argparse.Namespace) -> None:
    levels = Levels(config_of(0, options))

    def terms() -> set[int]:
        return {len(each.reference["metadata"]["expression"].split()) // 2 + 1 for each in levels.draw(40)}

    assert terms() == {2, 3}
    levels.count([True] * 511)
    assert levels.level == 0, "the sampler waits for 512 answers"
    levels.count([True])
    assert levels.level == 1
    levels.count([False] * 511)
    assert levels.level == 1, "the counts of a level begin at 0"
    levels.count([False])
    assert levels.level == 0, "too hard"
    for _ in range(5):
        levels.count([True] * 1000)
    assert levels.level == 2
    assert terms() == {3, 4, 5}


@pytest.mark.parametrize(
    ("successes", "samples", "k", "expected"),
    [([0, 4], 4, 1, 0.5), ([1, 0], 4, 4, 0.5), ([2], 4, 2, 1 - 1 / 6), ([0], 64, 64, 0.0), ([1], 64, 64, 1.0)],
)
def test_pass_at_k(successes: list[int], samples: int, k: int, expected: float) -> None:
    assert pass_at(successes, samples, k) == pytest.approx(expected)


RESULTS: dict[str, Result] = {
    "warm start": {"greedy": 0.1, "pass": {"1": 0.1, "64": 0.6}},
    "reinforcement": {"greedy": 0.8},
    "shuffled": {"greedy": 0.15},
    "supervised": {"greedy": 0.2},
    "rejection": {"greedy": 0.5},
    "iterated": {"greedy": 0.9},
}


def test_verdict_fails_for_an_arm_that_is_missing() -> None:
    rest = {arm: result for arm, result in RESULTS.items() if arm != "shuffled"}
    assert failed(1, rest) == ["seed 1: not measured: control: the same with shuffled rewards"]
    assert len(failed(1, {})) == 1


def test_verdict_passes_whoever_wins_beside_iterated_rejection() -> None:
    assert not failed(0, RESULTS)


@pytest.mark.parametrize(
    ("arm", "result", "message"),
    [
        ("warm start", {"greedy": 0.1, "pass": {"64": 0.8}}, "pass@64 is 0.800"),
        ("supervised", {"greedy": 0.81}, "longer warm start is 0.810"),
        ("rejection", {"greedy": 0.8}, "one round is 0.800"),
        ("shuffled", {"greedy": 0.16}, "the control rose from 0.100 to 0.160"),
    ],
)
def test_verdict_fails_for_a_rival_that_is_level(arm: str, result: Result, message: str) -> None:
    assert [message in each for each in failed(3, RESULTS | {arm: result})] == [True]
