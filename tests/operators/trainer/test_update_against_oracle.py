"""Updates match a plain float64 loop: losses, gradients of every optimizer step, AdamW's weights, metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from optimizer_steps import OptimizerStep, distance, record_steps
from oracle import Expected, expected_adamw, expected_update
from pydantic import TypeAdapter
from trainer_batches import make_batch, save_tiny_model, with_floats
from two_ranks import parts, read_steps, train_ranks

from operators.trainer.config import AlgorithmConfig, AlgorithmName, CriticConfig, LearnerConfig
from operators.trainer.learner import Learner
from schemas import columns
from schemas.records import MicroBatch

NAMES: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
KLS = (None, ("loss", "k1"), ("reward", "k1"), ("loss", "k2"), ("reward", "k2"), ("loss", "k3"), ("reward", "k3"))
CORRECTIONS = (None, ("truncate", "sequence"), ("mask", "token"), ("none", None), ("mask", "sequence"))
COUNTS = ((None, None), (2, 1), (1, 2), (2, 2))
"""Mini-batches and epochs; None: the algorithm's own."""
PACKINGS = (
    (10**6, 4096, False),
    (40, 7, False),
    (12, 1000, True),
)
"""micro_batch_tokens, logits_chunk_tokens, gradient_checkpointing."""
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"proximal": "behaviour"},
    {"aggregation": "token_mean", "dual_clip": 1.5},
    {"aggregation": "sequence_sum", "clip_low": 0.05, "clip_high": 0.07, "discount": 0.9},
    {"aggregation": "constant_length", "correction_low": 0.3, "correction_cap": 1.5, "gae_lambda": 0.8},
)
TOLERANCE = 1e-5
"""Of losses, relative to the sum of their absolute terms, and of gradients, relative to their L2 norm. Two exceptions:
`SEQUENCE_TOLERANCE`, and mini-batches with gradients smaller than the update's mean (`check_gradients`)."""
BFLOAT16_TOLERANCE = 0.06
"""Processors round differently: at most 4.4 % were measured without AVX-512, and 3.2 % with AMX."""
SEQUENCE_TOLERANCE = 3e-5
"""Of weights by sequence: each has the rounding of up to 9 tokens' log-probabilities, sqrt(9) times that of one."""


@dataclass(frozen=True)
class Case:
    """A combination of settings by its number, from which `config` is built."""

    name: AlgorithmName
    kl: int
    correction: int
    count: int
    packing: int
    other: int

    @property
    def config(self) -> LearnerConfig:
        kl, correction = KLS[self.kl], CORRECTIONS[self.correction]
        algorithm: dict[str, Any] = {"name": self.name, "max_response_tokens": 25} | OTHERS[self.other]
        if kl:
            algorithm |= {"kl_coefficient": 0.2, "kl_in": kl[0], "kl_kind": kl[1]}
        if correction:
            algorithm |= {"correction": correction[0], "correction_level": correction[1]}
        (mini, epochs), (tokens, chunk, again) = COUNTS[self.count], PACKINGS[self.packing]
        return LearnerConfig(
            algorithm=AlgorithmConfig(**algorithm),
            critic=CriticConfig(learning_rate=5e-3, value_clip=0.1),
            mini_batches=mini,
            epochs=epochs,
            micro_batch_tokens=tokens,
            logits_chunk_tokens=chunk,
            gradient_checkpointing=again,
            learning_rate=3e-3,
            warmup_steps=0,
            schedule="cosine",
            total_steps=4,
            weight_decay=0.1,
            max_gradient_norm=0.5,
        )

    def __str__(self) -> str:
        return f"{self.name}-kl{self.kl}-w{self.correction}-n{self.count}-p{self.packing}-o{self.other}"


def some_cases() -> Iterator[Case]:
    """Three cases per algorithm that cover every value of every setting in different combinations."""
    for index, (number, name) in itertools.product(range(3), enumerate(NAMES)):
        counts, packing = (number + index) % 4, (number // 4 + index) % 3
        yield Case(name, (number + 3 * index) % 7, (2 * number + index) % 5, counts, packing, (number + index) % 5)


def every_case() -> Iterator[Case]:
    """Algorithms × KL × corrections × mini-batches and epochs.

    Each algorithm, correction and count has every packing and every value of the other settings with some KL.
    """
    lengths = len(KLS), len(CORRECTIONS), len(COUNTS)
    of_kl = len(CORRECTIONS) * len(COUNTS)
    for number, (name, *rest) in enumerate(itertools.product(NAMES, *map(range, lengths))):
        yield Case(name, *rest, packing=number % 3, other=(number + number // of_kl) % 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("oracle") / "model", scale=2.0)


@pytest.mark.parametrize("case", list(some_cases()), ids=str)
def test_update_matches_the_oracle(folder: Path, case: Case) -> None:
    check(folder, case.config)


@pytest.fixture(scope="module")
def of_two_ranks(folder: Path) -> Path:
    """The folder with the steps of two ranks in a case of each algorithm, then in `ROUNDED`, in one start."""
    return train_two_ranks(folder.parent, [*(case.config for case in list(some_cases())[: len(NAMES)]), *ROUNDED])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), list(enumerate(some_cases()))[: len(NAMES)], ids=str)
def test_update_of_two_ranks_matches_the_oracle(of_two_ranks: Path, number: int, case: Case) -> None:
    check_two_ranks(of_two_ranks, number, case.config)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_bfloat16_update_of_two_ranks_approximates_the_oracle(of_two_ranks: Path, number: int) -> None:
    check_two_ranks(of_two_ranks, len(NAMES) + number, ROUNDED[number], BFLOAT16_TOLERANCE)


@pytest.mark.soak
def test_updates_of_two_ranks_match_the_oracle_in_more_cases(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", scale=2.0)
    cases = list(some_cases())[len(NAMES) :]
    train_two_ranks(tmp_path, [case.config for case in cases])
    for number, case in enumerate(cases):
        check_two_ranks(tmp_path, number, case.config)


def train_two_ranks(folder: Path, configs: list[LearnerConfig]) -> Path:
    dump = TypeAdapter(LearnerConfig).dump_python
    return train_ranks(folder, [("model", dump(each, mode="json"), 0, 1) for each in configs], work="steps")


def check_two_ranks(folder: Path, number: int, config: LearnerConfig, tolerance: float = TOLERANCE) -> None:
    rows = [row for rank in parts(0) for row in rank]
    steps, found = read_steps(folder / f"steps-{number}.safetensors")
    expected = expected_update(config, folder / "model", rows, steps["actor"], steps["critic"])
    check_update(found, expected, steps["actor"], steps["critic"], max(tolerance, tolerance_of(config)))


@pytest.mark.soak
@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_update_matches_the_oracle_in_every_combination(folder: Path, case: Case) -> None:
    check(folder, case.config)


@pytest.mark.parametrize("tokens", [24, 10**6])
def test_conversations_match_the_oracle_trained_as_sequences(folder: Path, tokens: int) -> None:
    """With GAE and the token mean, a conversation of an agent is trained like a sequence with its reward."""
    algorithm = AlgorithmConfig(name="ppo", kl_coefficient=0.2, kl_in="reward", discount=0.9, gae_lambda=0.8)
    config = LearnerConfig(algorithm=algorithm, mini_batches=2, micro_batch_tokens=tokens, warmup_steps=0)
    (row,) = make_batch(3)
    apart = with_floats(row, "temperatures", dict.fromkeys(range(len(row.trajectory_ids)), 1.0))
    learner = Learner(config, folder)
    steps, critic_steps = record_steps(learner._actor), record_steps(learner._critic_trained)
    found = learner.update([with_conversations(apart)])
    expected = expected_update(config, folder, [apart], steps, critic_steps)
    check_gradients(steps, expected.gradients, TOLERANCE)
    check_gradients(critic_steps, expected.critic_gradients, TOLERANCE)
    check_losses(found, expected, TOLERANCE)


def with_conversations(row: MicroBatch) -> MicroBatch:
    """`row` with neighbours of one group as the conversations of one sequence."""
    groups = [name.partition(".")[0] for name in row.trajectory_ids]
    first = np.array([number == 0 or groups[number - 1] != name for number, name in enumerate(groups)])
    assert 1 < first.sum() < len(first)
    lengths = row.lengths.to_numpy()
    starts = np.cumsum(lengths) - lengths
    names = ("prompt_lengths", "rewards", "temperatures", "truncated", "version_epochs", "version_numbers")
    kept = {name: getattr(row, name).filter(first) for name in (*names, "staleness", "lineage_partitions")}
    return replace(
        row,
        **kept,
        lineage_offsets=row.lineage_offsets.filter(first),
        trajectory_ids=tuple(itertools.compress(row.trajectory_ids, first)),
        lengths=columns.integers(np.add.reduceat(lengths, np.flatnonzero(first))),
        breaks=columns.integers(starts[~first]),
        context_rewards=row.rewards,
    )


@pytest.mark.parametrize("case", list(some_cases())[: len(NAMES)], ids=str)
def test_bfloat16_update_approximates_the_oracle(folder: Path, case: Case) -> None:
    check_bfloat16(folder, case.config)


@pytest.mark.soak
@pytest.mark.parametrize("case", list(some_cases())[len(NAMES) :], ids=str)
def test_bfloat16_update_approximates_the_oracle_in_more_cases(folder: Path, case: Case) -> None:
    check_bfloat16(folder, case.config)


def check_bfloat16(folder: Path, config: LearnerConfig) -> None:
    check(folder, in_bfloat16(config), BFLOAT16_TOLERANCE)


def in_bfloat16(config: LearnerConfig) -> LearnerConfig:
    """`config` in bfloat16 without bounds: rounding may move a ratio to the other side of one."""
    bounds: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1e6, "dual_clip": None}
    unbounded = replace(config.algorithm, **bounds, correction_low=0.0, correction_cap=1e6)
    critic = replace(config.critic, value_clip=1e6)
    return replace(config, precision="bfloat16", algorithm=unbounded, critic=critic)


ROUNDED = [in_bfloat16(case.config) for case in some_cases() if case.name in ("tis", "ppo")][:2]
"""Of the default and of the algorithm with a critic."""


def check(folder: Path, config: LearnerConfig, tolerance: float = TOLERANCE) -> None:
    """Train two batches; compare the second, which begins from changed weights."""
    tolerance = max(tolerance, tolerance_of(config))
    learner = Learner(config, folder)
    steps = record_steps(learner._actor)
    critic_steps = record_steps(learner._critic_trained) if learner._critic else []
    learner.update(batch(1))
    began = len(steps), len(critic_steps)
    metrics = learner.update(batch(2))
    now, of_critic = steps[began[0] :], critic_steps[began[1] :]
    expected = expected_update(config, folder, batch(2), now, of_critic)
    check_update(metrics, expected, now, of_critic, tolerance)
    rate = 3e-3 * (1 + math.cos(math.pi / 4)) / 2 if config.schedule == "cosine" else config.learning_rate
    assert metrics["learning_rate"] == pytest.approx(rate)
    for taken, rates in ((steps, rate), (critic_steps, rate * config.critic.learning_rate / config.learning_rate)):
        if taken:
            assert taken[-1].rate == pytest.approx(rates)
            check_weights(taken, config)


def tolerance_of(config: LearnerConfig) -> float:
    """In float32."""
    return SEQUENCE_TOLERANCE if config.algorithm.correction_level == "sequence" else TOLERANCE


def check_update(
    found: dict[str, float],
    expected: Expected,
    steps: list[OptimizerStep],
    critic_steps: list[OptimizerStep],
    tolerance: float,
) -> None:
    check_gradients(steps, expected.gradients, tolerance)
    check_gradients(critic_steps, expected.critic_gradients, tolerance)
    check_losses(found, expected, tolerance)
    check_metrics(found, expected, steps, critic_steps, 100 * tolerance if tolerance > 1e-4 else 1e-4)


def batch(number: int) -> list[MicroBatch]:
    """Five groups in two records: one with equal rewards, one of a single sequence; logprobs near the model's own."""
    made = make_batch(number, groups=5, samples=3, number=number, parts=2, longest=9)
    lone = {f"p{100 * number + 4}.{member}" for member in (1, 2)}
    result = []
    for row in made:
        alike = {i: 1.0 for i, name in enumerate(row.trajectory_ids) if name.startswith(f"p{100 * number}.")}
        names = tuple(
            f"p{100 * number + 50 + i + 20 * row.index}.0" if n in lone else n for i, n in enumerate(row.trajectory_ids)
        )
        result.append(replace(with_floats(row, "rewards", alike), trajectory_ids=names))
    return result


def check_gradients(steps: list[OptimizerStep], expected: list[dict[str, torch.Tensor]], tolerance: float) -> None:
    assert len(steps) == len(expected)
    norms = [float(torch.cat([each.flatten() for each in gradient.values()]).norm()) for gradient in expected]
    for step, gradient, norm in zip(steps, expected, norms, strict=True):
        if norm == 0:  # a mini-batch of groups without advantage
            assert step.norm == 0
            continue
        # Where the gradients of a mini-batch's tokens cancel, float32 rounds what remains of them.
        rounding = max(1.0, sum(norms) / len(norms) / norm)
        assert distance(step.gradient, gradient) <= tolerance * rounding
        assert step.norm == pytest.approx(norm, rel=10 * tolerance * rounding)


def check_weights(steps: list[OptimizerStep], config: LearnerConfig) -> None:
    for step, after in zip(steps, expected_adamw(config, steps), strict=True):
        moved, wanted = (
            {name: tensor.double() - step.before[name].double() for name, tensor in each.items()}
            for each in (step.after, after)
        )
        assert distance(moved, wanted) <= 1e-3  # float32 weights hold a step of 3e-3 to about 1e-4


def check_losses(found: dict[str, float], expected: Expected, tolerance: float) -> None:
    """Relative to the sum of the absolute terms: a loss near 0 is a small difference of large ones."""
    named = {"loss": (expected.losses, expected.sizes)}
    if expected.critic_losses:
        named["critic/loss"] = expected.critic_losses, expected.critic_sizes
    for name, (losses, sizes) in named.items():
        apart = abs(found[name] - sum(losses) / len(losses))
        assert apart <= tolerance * sum(sizes) / len(sizes), name


def check_metrics(
    found: dict[str, float],
    expected: Expected,
    steps: list[OptimizerStep],
    critic_steps: list[OptimizerStep],
    tolerance: float,
) -> None:
    losses = {"loss": sum(expected.losses) / len(expected.losses), "grad_norm": max(step.norm for step in steps)}
    if critic_steps:
        losses["critic/loss"] = sum(expected.critic_losses) / len(expected.critic_losses)
        losses["critic/grad_norm"] = max(step.norm for step in critic_steps)
    for name, value in (losses | expected.metrics).items():
        assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    if expected.metrics:
        assert ("clip_ratio/low" in found) is ("clip_ratio/low" in expected.metrics)
