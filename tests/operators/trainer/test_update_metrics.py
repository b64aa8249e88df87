"""Metrics of an update against values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from operators.trainer.global_batch_metadata import GlobalBatchMetadata
from operators.trainer.losses import PolicyLogprobs, TokenLosses
from operators.trainer.metrics import TokenMetrics, batch_metrics, finite
from operators.trainer.mismatch import Mismatch

METADATA = GlobalBatchMetadata(
    rewards=np.array([1.0, 0.0, 0.5, 0.5]),
    groups=np.array([0, 0, 1, 2]),
    lengths=np.array([5, 7, 4, 4]),
    prompt_lengths=np.array([2, 2, 3, 1]),
    trained=np.array([3, 0, 1, 2]),
    staleness=np.array([0, 2, 1, 0]),
    truncated=np.array([False, True, False, False]),
    sequences=np.array([0, 1, 2, 2, 3]),
    context_rewards=np.array([1.0, 0.0, 0.25, 0.75, 0.5]),
    context_trained=np.array([3, 0, 1, 0, 2]),
    rows=slice(0, 4),
    tokens=slice(0, 6),
)


def test_metrics_of_a_batch() -> None:
    """Group 0 and the conversations of group 1 have different rewards, group 2 has one."""
    assert batch_metrics(METADATA, torch.tensor([1.0, -2.0])) == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.125**0.5),
        "frac_reward_zero_std": pytest.approx(1 / 3),
        "advantage/abs_mean": 1.5,
        "response_length/mean": 3.0,
        "response_length/max": 5.0,
        "response_length/clip_ratio": 0.25,
        "staleness/mean": 0.75,
        "staleness/max": 2.0,
        "batch/trajectories": 4.0,
        "batch/tokens": 20.0,
        "batch/trained_tokens": 6.0,
    }
    nothing = replace(METADATA, trained=np.zeros(4, np.int64))
    assert batch_metrics(nothing, torch.zeros(0))["advantage/abs_mean"] == 0


def test_only_finite_metrics_are_kept() -> None:
    assert finite({"a": 1.0, "b": float("nan"), "c": float("inf"), "d": 0.0}) == {"a": 1.0, "d": 0.0}


def added(ratios: list[float], kl: Tensor | None = None, **settings: bool) -> TokenMetrics:
    """The metrics of two micro-batches: one token, and the others. The first token is below the clip."""
    metrics, logs = TokenMetrics(**settings), torch.tensor(ratios).log()
    for part in (slice(0, 1), slice(1, None), slice(0, 0)):
        current = logs[part]
        of_part = torch.zeros(len(current), dtype=torch.int64)
        policy = PolicyLogprobs(current, current, torch.zeros(len(current)), of_part, 1)
        below = torch.arange(len(ratios))[part] == 0
        losses = TokenLosses(current, below, ~below)
        weights, entropies = torch.full((len(current),), 0.5), torch.full((len(current),), 2.0)
        metrics.add(policy, losses, weights, entropies, None if kl is None else kl[part])
    return metrics


def test_metrics_of_tokens() -> None:
    found = added([0.5, 1.0, 2.0, 0.5], torch.tensor([1.0, 0.0, 0.0, 0.0]), has_kl_penalty=True).means()
    mismatch = np.mean([r - np.log(r) - 1 for r in (0.5, 1.0, 2.0, 0.5)])
    assert found == pytest.approx(
        {
            "importance_ratio/mean": 1.0,
            "importance_ratio/max": 2.0,
            "ess": 4.0 / (0.25 + 1 + 4 + 0.25) / 1,
            "kl/mismatch": mismatch,
            "clip_ratio/low": 0.25,
            "clip_ratio/high": 0.75,
            "correction/weight_mean": 0.5,
            "entropy": 2.0,
            "kl/ref": 0.25,
        },
        rel=1e-6,
    )


def test_metrics_that_do_not_apply_are_left_out() -> None:
    found = added([1.0, 1.0], clip_can_bind=False).means()
    assert not {"kl/ref", "clip_ratio/low", "clip_ratio/high"} & found.keys()


def test_ratios_of_zero_are_bounded() -> None:
    assert added([0.0, 0.0]).means()["ess"] == pytest.approx(1)


def beside(others: list[float], largest: float) -> Any:
    """Two ranks, the other of which has these sums and this maximum."""

    def total(own: list[float]) -> list[float]:
        return [a + b for a, b in zip(own, others, strict=True)]

    def maximum(own: float) -> float:
        return max(own, largest)

    return SimpleNamespace(total=total, maximum=maximum)


def test_rank_without_tokens_reports_those_of_others() -> None:
    others = [2.0, 2.0, 2.0, 0.5, 0.0, 2.0, 1.0, 3.0, 0.0]
    found = TokenMetrics().means(beside(others, 0.75))
    assert found["importance_ratio/mean"] == found["ess"] == 1
    assert found["importance_ratio/max"] == 0.75
    assert found["kl/mismatch"] == 0.25
    assert found["entropy"] == 1.5


def test_rank_without_fresh_tokens_reports_those_of_others() -> None:
    found = Mismatch(torch.zeros(1, dtype=torch.bool)).means(beside([2.0, 1.0, 0.5, 2.0, 1.0, 0.0], 0.75))
    assert found == {
        "mismatch/abs_mean": 0.5,
        "mismatch/abs_max": 0.75,
        "mismatch/kl": 0.25,
        "mismatch/share_above_0.01": 1.0,
        "mismatch/share_above_0.1": 0.5,
        "mismatch/share_above_1": 0.0,
    }


def test_recorded_metrics_are_there_without_tokens() -> None:
    metrics = TokenMetrics()
    metrics.record("kl/ref", torch.tensor([1.0, 2.0]))
    metrics.record("nothing", torch.zeros(0))
    assert metrics.means() == {"kl/ref": 1.5}
