"""The contract of every engine with a model for its draws: their frequencies, their random numbers, their logprobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kinds import WITH_MODEL, MakeEngine, maker
from tiny_engines import drawn_from, mixed, plain_logprobs, request, run
from tiny_models import VOCABULARY, tiny_model
from vllm_engines import FAMILY

from infra.models.weights import save_weights, weight_tensors
from operators.rollout.engine import PartialResponse, Request
from schemas.records import PolicyVersion

DRAWS = 1500


@pytest.fixture(params=WITH_MODEL)
def make(request: pytest.FixtureRequest) -> MakeEngine:
    return maker(request.param)


@pytest.mark.parametrize("known", [(), (4, 9, 2)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}])
def test_tokens_have_the_frequencies_of_the_distribution(
    make: MakeEngine, sampling: dict[str, Any], known: tuple[int, ...]
) -> None:
    asked = next_tokens(DRAWS, known, **sampling)
    drawn = [completion.generated.token_ids[-1] for completion in run(make(), asked).values()]
    with torch.inference_mode():
        ids = torch.tensor([[*asked[0].prompt.tolist(), *known]])
        logits = tiny_model(FAMILY)(input_ids=ids).logits[0, -1].float()
    expected = DRAWS * drawn_from(logits, asked[0].sampling).exp().numpy()
    counts = np.bincount(drawn, minlength=VOCABULARY)
    assert (counts[expected == 0] == 0).all()
    common = expected >= 5
    counts, expected = (np.append(each[common], each[~common].sum()) for each in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    # Chi-square at p = 1e-4, by the approximation of Wilson and Hilferty.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < bound


def test_resumed_response_gets_new_random_numbers(make: MakeEngine, tmp_path: Path) -> None:
    """From a uniform distribution an equal random number draws an equal token, whatever the tokens before it."""
    uniform = tiny_model(FAMILY)
    with torch.no_grad():
        weight_tensors(uniform)["lm_head.weight"].zero_()
    save_weights(uniform, tmp_path / "w")
    it, drawn = make(), []
    it.load(tmp_path / "w", PolicyVersion(1, 1))
    for known in ((), (4,), (4, 9)):
        done = run(it, next_tokens(300, known))
        drawn.append([done[name].generated.token_ids[-1] for name in sorted(done)])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        equal = np.equal(drawn[one], drawn[other]).mean()
        assert 0 < equal < 4 / VOCABULARY


def test_response_is_resumed_under_other_weights(make: MakeEngine, tmp_path: Path) -> None:
    save_weights(tiny_model(FAMILY, seed=1), tmp_path / "w")
    asked, it = mixed(12), make()
    for one in asked:
        it.submit(one)
    done = {completion.trajectory_id for _ in range(6) for completion in it.step()}
    released = it.release([one.trajectory_id for one in asked])
    it.load(tmp_path / "w", PolicyVersion(1, 1))
    left = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id not in done]
    assert any(len(partial.token_ids) for partial in released.values())
    resumed, it = run(it, left), make(slots=3)
    it.load(tmp_path / "w", PolicyVersion(1, 1))
    again = run(it, left)
    for one in left:
        partial, whole = released[one.trajectory_id], resumed[one.trajectory_id].generated
        known = len(partial.token_ids)
        assert whole.token_ids[:known].tolist() == partial.token_ids.tolist()
        assert whole.logprobs[:known].tolist() == partial.logprobs.tolist()
        off = plain_logprobs(tiny_model(FAMILY, seed=1), one, whole) - whole.logprobs
        assert np.abs(off[known:]).max(initial=0.0) < 1e-4
        assert again[one.trajectory_id].generated.token_ids.tolist() == whole.token_ids.tolist()


def next_tokens(count: int, known: tuple[int, ...], **sampling: Any) -> list[Request]:
    """Requests of other trajectories for one token each after the same prompt and `known` tokens."""
    one = request(0, new=len(known) + 1, **sampling)
    partial = PartialResponse(np.array(known, np.int32), np.zeros(len(known), np.float32)) if known else None
    return [replace(one, trajectory_id=f"p{number}.0", partial=partial) for number in range(count)]
