"""Algorithms by name, configuration overrides, and aggregation coefficients."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from operators.trainer import advantages, losses
from operators.trainer.algorithms import AGGREGATIONS, FUNCTIONS, resolve
from operators.trainer.config import AggregationName, AlgorithmConfig, AlgorithmName
from operators.trainer.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 3 sequences of 2, 0 and 4 tokens: Σ|y| = 6, B = 3, L_max = 8
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean", [1 / 6, 1 / 3, 1 / 12]),
        ("sequence_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant_length", [1 / 24, 1 / 24, 1 / 24]),
    ],
)
def test_aggregation_coefficients(name: AggregationName, expected: list[float]) -> None:
    found = AGGREGATIONS[name](torch.tensor([2, 0, 4]), 8)
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "sequence_sum"])
def test_only_token_of_a_batch_has_the_whole_weight(name: AggregationName) -> None:
    assert AGGREGATIONS[name](torch.tensor([1]), None).tolist() == [1.0]


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_aggregation_is_finite_without_trained_tokens(name: AggregationName) -> None:
    assert torch.isfinite(AGGREGATIONS[name](torch.tensor([0, 0]), 8)).all()


def test_every_algorithm_name_is_defined() -> None:
    assert set(FUNCTIONS) == set(PRESETS) == set(get_args(AlgorithmName))
    assert set(AGGREGATIONS) == set(get_args(AggregationName))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_resolve_returns_the_algorithm_without_overrides(name: AlgorithmName) -> None:
    found, preset, functions = (
        resolve(AlgorithmConfig(name=name, max_response_tokens=8)),
        PRESETS[name],
        FUNCTIONS[name],
    )
    assert (found.advantage, found.loss, found.critic) == (functions.advantage, functions.loss, functions.critic)
    assert (found.aggregation, found.clip, found.proximal, found.correction) == (
        preset.aggregation,
        preset.clip,
        preset.proximal,
        preset.correction,
    )


def test_resolve_applies_only_the_configured_overrides() -> None:
    config = AlgorithmConfig(
        name="grpo", aggregation="token_mean", clip_high=0.5, dual_clip=3.0, proximal="update_start", correction="mask"
    )
    found, known = resolve(config), PRESETS["grpo"]
    assert (found.aggregation, found.proximal) == ("token_mean", "update_start")
    assert (found.clip.low, found.clip.high, found.clip.dual) == (known.clip.low, 0.5, 3.0)
    assert (found.correction.kind, found.correction.cap) == ("mask", known.correction.cap)
    assert (found.advantage, found.loss) == (advantages.group_normalised, losses.clipped_surrogate)


def test_resolve_applies_an_override_of_zero() -> None:
    assert resolve(AlgorithmConfig(clip_low=0.0)).clip.low == 0.0


def test_resolve_rejects_a_missing_max_response_tokens() -> None:
    with pytest.raises(ValueError, match="max_response_tokens"):
        resolve(AlgorithmConfig(name="dr_grpo"))
