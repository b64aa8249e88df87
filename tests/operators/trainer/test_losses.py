"""Token losses, weights and gradients compared with loops over single tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from operators.trainer import losses
from operators.trainer.config import KlKind
from operators.trainer.losses import PolicyLogprobs
from operators.trainer.presets import UNCLIPPED, Clip, Correction

SEGMENTS = [0, 0, 0, 2, 2, 3]  # sequence 1 has no trained token
CURRENT = [-1.0, -0.5, -2.0, -0.1, -3.0, -1.5]
PROXIMAL = [-1.5, -0.5, -1.9, -0.6, -2.0, -1.5]
BEHAVIOUR = [-1.0, -1.5, -1.9, -1.4, -1.0, -4.5]
ADVANTAGES = [1.0, -1.0, 0.5, -2.0, 1.5, -1.0]
CLIP = Clip(0.2, 0.28)


def policy() -> PolicyLogprobs:
    current = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)
    proximal, behaviour = (torch.tensor(values, dtype=torch.float64) for values in (PROXIMAL, BEHAVIOUR))
    return PolicyLogprobs(current, proximal, behaviour, torch.tensor(SEGMENTS), 4)


def advantages() -> Tensor:
    return torch.tensor(ADVANTAGES, dtype=torch.float64)


def surrogate(ratio: float, advantage: float, clip: Clip) -> tuple[float, float]:
    """The clipped surrogate and its derivative with respect to the ratio."""
    bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
    value, slope = -ratio * advantage, -advantage
    if bounded * advantage < ratio * advantage:
        value, slope = -bounded * advantage, 0.0
    if clip.dual is not None and advantage < 0 and value > -clip.dual * advantage:
        value, slope = -clip.dual * advantage, 0.0
    return value, slope


@pytest.mark.parametrize("clip", [CLIP, Clip(0.2, 0.2), Clip(0.1, 5.0, dual=1.2), Clip(0.2, 0.28, dual=3.0)])
def test_clipped_surrogate(clip: Clip) -> None:
    probed = policy()
    found = losses.clipped_surrogate(probed, advantages(), clip)
    expected = [
        surrogate(math.exp(new - old), advantage, clip)
        for new, old, advantage in zip(CURRENT, PROXIMAL, ADVANTAGES, strict=True)
    ]
    slopes = [d * math.exp(new - old) for (_, d), new, old in zip(expected, CURRENT, PROXIMAL, strict=True)]
    assert found.values.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12)
    assert gradient(found.values, probed) == pytest.approx(slopes, rel=1e-12)


def test_loss_table_has_clipped_tokens_on_each_side() -> None:
    ratios = [math.exp(new - old) for new, old in zip(CURRENT, PROXIMAL, strict=True)]
    assert any(r > 1.28 and a > 0 for r, a in zip(ratios, ADVANTAGES, strict=True))
    assert any(r > 1.28 and a < 0 for r, a in zip(ratios, ADVANTAGES, strict=True))
    assert any(r < 0.8 and a > 0 for r, a in zip(ratios, ADVANTAGES, strict=True))


@pytest.mark.parametrize("clip", [CLIP, Clip(0.05, 0.05)])
def test_sequence_surrogate_ratio_and_token_gradient(clip: Clip) -> None:
    probed = policy()
    found = losses.sequence_clipped_surrogate(probed, advantages(), clip)
    values, slopes = [], []
    for segment, advantage in zip(SEGMENTS, ADVANTAGES, strict=True):
        own = [new - old for new, old, s in zip(CURRENT, PROXIMAL, SEGMENTS, strict=True) if s == segment]
        ratio = math.exp(sum(own) / len(own))
        value, slope = surrogate(ratio, advantage, clip)
        values.append(value)
        slopes.append(slope * ratio)  # d s_it / d log π_t = s_i
    assert found.values.tolist() == pytest.approx(values, rel=1e-12)
    assert gradient(found.values, probed) == pytest.approx(slopes, rel=1e-12)


def test_cispo_clips_weights_and_keeps_gradients() -> None:
    probed = policy()
    found = losses.clipped_weight_reinforce(probed, advantages(), CLIP)
    weights = [min(max(math.exp(n - o), 0.8), 1.28) for n, o in zip(CURRENT, PROXIMAL, strict=True)]
    slopes = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert found.values.tolist() == pytest.approx([s * n for s, n in zip(slopes, CURRENT, strict=True)], rel=1e-12)
    assert gradient(found.values, probed) == pytest.approx(slopes, rel=1e-12)
    assert 0 not in slopes


@pytest.mark.parametrize(
    ("loss", "clip", "below", "above"),
    [
        # ratios 1.65, 1, 0.90, 1.65, 0.37, 1; advantages +, -, +, -, +, -
        (losses.clipped_surrogate, CLIP, [], [0]),
        (losses.clipped_surrogate, Clip(0.2, 0.28, dual=1.5), [], [0, 3]),
        (losses.clipped_surrogate, Clip(0.2, 0.28, dual=3.0), [], [0]),
        (losses.clipped_weight_reinforce, CLIP, [4], [0, 3]),
        (losses.clipped_weight_reinforce, Clip(1.0, 0.28), [], [0, 3]),
        # ratios of the sequences 1.14, 0.78 and 1
        (losses.sequence_clipped_surrogate, Clip(0.2, 0.1), [3], [0, 2]),
        (losses.sequence_clipped_surrogate, CLIP, [3], []),
    ],
)
def test_losses_count_tokens_whose_gradient_the_clip_changes(
    loss: losses.TokenLoss, clip: Clip, below: list[int], above: list[int]
) -> None:
    probed, small = policy(), 0.5 * advantages()
    found = loss(probed, small, clip)
    assert (found.below.nonzero()[:, 0].tolist(), found.above.nonzero()[:, 0].tolist()) == (below, above)
    free = gradient(loss(probed, small, UNCLIPPED).values, probed)
    changed = [
        i for i, (one, other) in enumerate(zip(gradient(found.values, probed), free, strict=True)) if one != other
    ]
    assert changed == sorted(below + above)


LOSSES = (losses.clipped_surrogate, losses.sequence_clipped_surrogate, losses.clipped_weight_reinforce)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_count_no_token_without_advantage(loss: losses.TokenLoss) -> None:
    found = loss(policy(), 0 * advantages(), Clip(0.1, 0.1, dual=1.1))
    assert not found.below.any()
    assert not found.above.any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sign", [1, -1])
def test_losses_count_no_token_at_a_bound(loss: losses.TokenLoss, sign: int) -> None:
    """Ratios are 1, and so are all bounds: the gradient is that without a clip."""
    same = torch.zeros(2)
    found = loss(PolicyLogprobs(same, same, same, torch.tensor([0, 1]), 2), sign * torch.ones(2), Clip(0.0, 0.0, 1.0))
    assert not found.below.any()
    assert not found.above.any()


@pytest.mark.parametrize(
    ("correction", "bound"),
    [
        (Correction("none"), lambda w: 1.0),
        (Correction("truncate", cap=2.0), lambda w: min(w, 2.0)),
        (Correction("truncate", cap=2.0, low=0.8), lambda w: min(max(w, 0.8), 2.0)),
        (Correction("mask", cap=2.5, low=0.5), lambda w: w if 0.5 <= w <= 2.5 else 0.0),
        (Correction("mask", cap=1.0, low=0.0), lambda w: w if w <= 1.0 else 0.0),  # token 2 is at the bound
        (Correction("mask", cap=99.0, low=1.0), lambda w: w if w >= 1.0 else 0.0),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weights(correction: Correction, bound: object, level: str) -> None:
    logs = [old - behaved for old, behaved in zip(PROXIMAL, BEHAVIOUR, strict=True)]
    if level == "sequence":
        logs = [sum(w for w, s in zip(logs, SEGMENTS, strict=True) if s == own) for own in SEGMENTS]
    expected = [bound(math.exp(log)) for log in logs]  # type: ignore[operator]
    correction = Correction(correction.kind, correction.cap, correction.low, level)  # type: ignore[arg-type]
    found = losses.correction_weights(policy(), correction)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("current", "reference", "expected"),
    [
        (-1.0, -1.0, 0.0),
        (-1.0, -2.0, math.exp(-1) + 1 - 1),
        (-2.0, -1.0, math.e - 1 - 1),
        (-50.0, -1.0, 10.0),
    ],
)
def test_kl_penalty(current: float, reference: float, expected: float) -> None:
    found = losses.kl_penalty(torch.tensor(current).double(), torch.tensor(reference).double())
    assert float(found) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.7), ("k2", 0.245), ("k3", math.exp(-0.7) + 0.7 - 1)])
def test_kl_penalty_kinds(kind: KlKind, expected: float) -> None:
    found = losses.kl_penalty(*torch.tensor([-0.3, -1.0], dtype=torch.float64), kind)
    assert float(found) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "before", "target", "expected", "slope"),
    [
        (0.3, 0.0, 1.0, 0.5 * 0.7**2, -0.7),
        (0.9, 0.0, 1.0, 0.5 * 0.5**2, 0.0),  # beyond the clip towards its target: no gradient
        (-0.9, 0.0, 1.0, 0.5 * 1.9**2, -1.9),  # away from the target: keeps its gradient
    ],
)
def test_value_loss(value: float, before: float, target: float, expected: float, slope: float) -> None:
    given = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    found = losses.value_loss(given, *torch.tensor([before, target], dtype=torch.float64), 0.5)
    (gradient,) = torch.autograd.grad(found, given)
    assert (float(found.detach()), float(gradient)) == pytest.approx((expected, slope), abs=1e-12)


def test_importance_ratios_stay_finite_for_distant_policies() -> None:
    far = losses.importance_ratios(torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0]))
    assert far.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def gradient(values: Tensor, probed: PolicyLogprobs) -> list[float]:
    (found,) = torch.autograd.grad(values.sum(), probed.current)
    return found.tolist()
