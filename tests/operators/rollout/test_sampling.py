from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from operators.rollout.random_streams import resumed_seed, stream_key, uniforms
from operators.rollout.sampling import BLOCK, draw, sample
from operators.rollout.sampling_columns import NO_TOKEN, SamplingColumns


def columns(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingColumns:
    return SamplingColumns.of(np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p))


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


# --- uniforms


def test_uniform_depends_only_on_seed_id_and_position() -> None:
    keys = np.array([stream_key(1, "p0.0"), stream_key(1, "p0.1"), stream_key(2, "p0.0")], np.uint64)
    at_three = uniforms(keys, np.array([3, 3, 3]))
    assert len(set(at_three)) == 3
    shuffled = uniforms(keys[[2, 0, 1]], np.array([3, 3, 3]))
    assert (shuffled == at_three[[2, 0, 1]]).all()
    assert uniforms(keys[:1], np.array([4]))[0] != at_three[0]


def test_random_stream_is_stable_between_releases() -> None:
    """If these numbers change, a trajectory resumed by a newer release gets other draws."""
    # SplitMix64 seeded with 1234567: the first outputs of its reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    assert got.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_uniforms_are_uniform_and_independent() -> None:
    keys = np.array([stream_key(0, f"p{i}.0") for i in range(2000)], np.uint64)
    drawn = np.stack([uniforms(keys, np.full(2000, position)) for position in range(4)])
    assert ((drawn >= 0) & (drawn < 1)).all()
    for row in drawn:
        counts = np.histogram(row, bins=20, range=(0, 1))[0]
        assert ((counts - 100) ** 2 / 100).sum() < 50.8  # chi-square, 19 degrees of freedom, p = 1e-4
    correlations = np.corrcoef(np.concatenate([drawn, drawn[:, ::-1][:2]]))
    assert np.abs(correlations - np.diag(np.diag(correlations))).max() < 4 / math.sqrt(2000)


def test_resumed_seed_depends_on_seed_id_and_known_tokens() -> None:
    found = [resumed_seed(seed, name, known) for seed in (1, 2) for name in ("p0.0", "p0.1") for known in (0, 1, 17)]
    assert len(set(found)) == 12
    assert all(0 <= each < 2**63 for each in found)
    assert found[0] == resumed_seed(1, "p0.0", 0)


# --- distribution


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 0, 1.0, (0.4, 0.3, 0.2, 0.1)),
        (0.5, 0, 1.0, (16 / 30, 9 / 30, 4 / 30, 1 / 30)),
        (1.0, 2, 1.0, (4 / 7, 3 / 7, 0, 0)),
        (1.0, 9, 1.0, (0.4, 0.3, 0.2, 0.1)),
        (1.0, 0, 0.65, (4 / 7, 3 / 7, 0, 0)),
        (1.0, 0, 0.75, (4 / 9, 3 / 9, 2 / 9, 0)),
        (1.0, 0, 1e-6, (1, 0, 0, 0)),
        # top-p applies to the tokens kept by top-k: 4/9 + 3/9 < 0.8, so it keeps three.
        (1.0, 3, 0.8, (4 / 9, 3 / 9, 2 / 9, 0)),
        (1.0, 2, 0.5, (1, 0, 0, 0)),
        (0.5, 3, 1.0, (16 / 29, 9 / 29, 4 / 29, 0)),
        (0.0, 0, 1.0, (1, 0, 0, 0)),
        (0.0, 2, 0.5, (1, 0, 0, 0)),
    ],
)
def test_sample_follows_the_distribution(
    temperature: float, top_k: int, top_p: float, expected: tuple[float, ...]
) -> None:
    rows = 4000
    keys = np.full(rows, stream_key(5, "p1.2"), np.uint64)
    draws = uniforms(keys, np.arange(rows))
    # The order of the tokens is not that of their probabilities.
    order = [2, 0, 3, 1]
    logits = logits_of(0.4, 0.3, 0.2, 0.1)[:, order].repeat(rows, 1)
    tokens, logprobs = sample(logits, columns(rows, temperature, top_k, top_p), draws)
    wanted = np.array(expected)[order]
    counts = np.bincount(tokens, minlength=4)
    assert (counts[wanted == 0] == 0).all()
    likely = wanted > 0
    chi_square = ((counts - rows * wanted)[likely] ** 2 / (rows * wanted[likely])).sum()
    assert chi_square < 21.1  # 3 degrees of freedom, p = 1e-4
    if temperature > 0:
        assert np.abs(np.exp(logprobs) - wanted[tokens]).max() < 1e-6
    else:  # a greedy token has its log-softmax of the raw logits
        assert np.abs(np.exp(logprobs) - 0.4).max() < 1e-6


def test_sample_uses_the_parameters_of_each_row() -> None:
    logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(0)) * 2
    temperature = np.array([1.0, 0.7, 0.0, 1.3, 1.0, 0.0])
    top_k, top_p = np.array([0, 5, 0, 0, 3, 7]), np.array([1.0, 1.0, 1.0, 0.8, 0.9, 0.3])
    draws = np.linspace(0.05, 0.95, 6)
    together = sample(logits, SamplingColumns.of(temperature, top_k, top_p), draws)
    for row in range(6):
        alone = SamplingColumns.of(temperature[[row]], top_k[[row]], top_p[[row]])
        token, logprob = sample(logits[[row]], alone, draws[[row]])
        assert token[0] == together[0][row]
        assert abs(logprob[0] - together[1][row]) < 1e-6
    order = np.array([5, 2, 0, 4, 1, 3])
    shuffled = SamplingColumns.of(temperature[order], top_k[order], top_p[order])
    assert (sample(logits[order], shuffled, draws[order])[0] == together[0][order]).all()


class CopiesToDevice(TorchDispatchMode):
    """Records of each copy between devices in its context whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if operation is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") not in (None, args[0].device):
            self.waits.append(not (kwargs or {}).get("non_blocking"))
        return operation(*args, **(kwargs or {}))


def test_draw_waits_for_no_copy() -> None:
    """On the meta device: reading a value of it would fail."""
    mixed = SamplingColumns.of(np.array([1.0, 0.5, 0.0]), np.array([3, 0, 0]), np.array([0.9, 1.0, 1.0]))
    with CopiesToDevice() as copies:
        draw(torch.empty(3, 4 * BLOCK, device="meta"), mixed, np.zeros(3))
    assert copies.waits == [False] * 6


def test_sample_keeps_tokens_that_tie_with_the_last() -> None:
    draws = np.linspace(0, 1, 50, endpoint=False)
    tokens, logprobs = sample(torch.zeros(50, 4), columns(50, top_k=2), draws)
    assert set(tokens) == {0, 1, 2, 3}
    assert np.abs(np.exp(logprobs) - 0.25).max() < 1e-6


# --- edge cases


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (0.5 - 1e-9, 1), (0.5 + 1e-9, 2), (1 - 2**-53, 2)])
def test_sample_never_draws_a_token_of_probability_zero(draw: float, token: int) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert sample(logits, columns(1), np.array([draw]))[0][0] == token


def test_sample_with_the_largest_uniform_stays_in_range() -> None:
    logits = torch.randn((4, 50_000), generator=torch.Generator().manual_seed(0))
    logits[:, -1] = -torch.inf
    tokens, logprobs = sample(logits, columns(4), np.full(4, 1 - 2**-53))
    assert (tokens == 49_999 - 1).all()
    assert np.isfinite(logprobs).all()


def test_logit_noise_changes_tokens_only_at_boundaries() -> None:
    rows = 3000
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((rows, 100), generator=generator)
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=generator)
    draws = uniforms(np.full(rows, 7, np.uint64), np.arange(rows))
    steps = logits.double().softmax(-1).cumsum(-1).numpy()
    moved = sample(logits, columns(rows), draws)[0] != sample(noisy, columns(rows), draws)[0]
    assert np.abs(steps - draws[:, None]).min(1)[moved].max(initial=0) < 1e-5
    assert moved.sum() <= 5


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_row_gets_no_token(broken: float, temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = broken
    tokens, logprobs = sample(logits, columns(3, temperature), np.full(3, 0.5))
    expected = sample(torch.zeros(1, 5), columns(1, temperature), np.array([0.5]))[0][0]
    assert tokens.tolist() == [expected, NO_TOKEN, expected]
    assert np.isnan(logprobs).tolist() == [False, True, False]


def test_greedy_sample_takes_the_first_of_equals() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 2.0]]), columns(1, 0.0), np.array([0.9]))[0][0] == 1
