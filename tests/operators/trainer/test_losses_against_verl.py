"""Advantages, losses and gradients of every algorithm compared with verl's on the same random batches.

`vectors/verl.safetensors` holds verl's results; `make verl-vectors` regenerates it. The tests do not need verl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from operators.trainer.advantages import Rewards, value_targets
from operators.trainer.algorithms import AGGREGATIONS, resolve
from operators.trainer.config import AlgorithmConfig, AlgorithmName
from operators.trainer.losses import PolicyLogprobs, correction_weights, kl_penalty, value_loss

FILE = Path(__file__).parent / "vectors" / "verl.safetensors"
VALUES, GRADIENTS = 1e-6, 1e-5


@cache
def vectors() -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(FILE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


SETTINGS: dict[str, dict[str, Any]] = json.loads(vectors()[1]["algorithms"])


@dataclass
class Case:
    """One batch: `found(name)` is what verl gave of its trained tokens."""

    number: int
    rows: slice
    tokens: slice

    def row_column(self, name: str) -> Tensor:
        return vectors()[0][name][self.rows]

    def token_column(self, name: str) -> Tensor:
        return vectors()[0][name][self.tokens].double()

    def one(self, name: str) -> float:
        return float(vectors()[0][name][self.number])


def cases() -> Iterator[Case]:
    tensors, metadata = vectors()
    rows = int(metadata["rows"])
    ends = tensors["lengths"].cumsum(0)
    for number in range(int(metadata["cases"])):
        first, last = number * rows, (number + 1) * rows
        yield Case(number, slice(first, last), slice(int(ends[first - 1]) if first else 0, int(ends[last - 1])))


def test_verl_vectors_cover_every_algorithm() -> None:
    _, metadata = vectors()
    assert int(metadata["cases"]) >= 50
    assert metadata["source"].startswith("verl 0.9.1")
    assert {settings["name"] for settings in SETTINGS.values()} == set(get_args(AlgorithmName))


@pytest.mark.parametrize("label", SETTINGS)
def test_advantages_losses_and_gradients_match_verl(label: str) -> None:
    config = AlgorithmConfig(**{"correction": "none", **SETTINGS[label]})
    algorithm = resolve(config)
    for case in cases():
        lengths = case.row_column("lengths")
        proximal, behaviour = case.token_column("proximal"), case.token_column("behaviour")
        penalties = None
        if config.kl_in == "reward":
            penalties = config.kl_coefficient * kl_penalty(proximal, case.token_column("reference"), config.kl_kind)
        values = case.token_column("values") if algorithm.critic else None
        rewards = Rewards(case.row_column("rewards"), case.row_column("groups"), lengths, penalties, values)
        advantages = algorithm.advantage(rewards, config)
        close(advantages, case.token_column(f"{label}/advantages"), VALUES)
        if algorithm.critic:
            returns = value_targets(rewards, config)
            close(returns, case.token_column(f"{label}/returns"), VALUES)
            check_value_loss(case, label, returns)
        current = case.token_column("current").requires_grad_()
        segments = torch.arange(len(lengths)).repeat_interleave(lengths)
        policy = PolicyLogprobs(current, proximal, behaviour, segments, len(lengths))
        coefficients = AGGREGATIONS[algorithm.aggregation](lengths, config.max_response_tokens)[segments]
        weights = correction_weights(policy, algorithm.correction)
        loss = (coefficients * weights * algorithm.loss(policy, advantages, algorithm.clip).values).sum()
        assert float(loss.detach()) == pytest.approx(case.one(f"{label}/loss"), abs=VALUES)
        (gradient,) = torch.autograd.grad(loss, current)
        close(gradient, case.token_column(f"{label}/gradient"), GRADIENTS)


def check_value_loss(case: Case, label: str, returns: Tensor) -> None:
    new = case.token_column("new_values").requires_grad_()
    loss = value_loss(new, case.token_column("values"), returns, float(vectors()[1]["value_clip"])).mean()
    assert float(loss.detach()) == pytest.approx(case.one(f"{label}/value_loss"), abs=VALUES)
    (gradient,) = torch.autograd.grad(loss, new)
    close(gradient, case.token_column(f"{label}/value_gradient"), GRADIENTS)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalties_match_verl(kind: Any) -> None:
    for case in cases():
        current = case.token_column("current").requires_grad_()
        penalty = kl_penalty(current, case.token_column("reference"), kind)
        (gradient,) = torch.autograd.grad(penalty.sum(), current)
        close(penalty.detach(), case.token_column(f"{kind}/penalty"), VALUES)
        close(gradient, case.token_column(f"{kind}/gradient"), GRADIENTS)


def close(found: Tensor, expected: Tensor, limit: float) -> None:
    """Assert a difference below `limit`, relative to the larger of 1 and the expected value."""
    worst = float(((found - expected).abs() / expected.abs().clamp(min=1)).max())
    assert worst <= limit
