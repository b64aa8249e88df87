"""vLLM's engine beside ours: the same draws, whoever computes the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_engines import engine, mixed, request, run
from tiny_models import tiny_model
from vllm_engines import FAMILY, vllm_engine

from infra.models.weights import save_weights
from schemas.records import PolicyVersion

pytest.importorskip("vllm", reason="make vllm-test has it")


def test_vllm_draws_the_tokens_that_the_transformers_engine_draws() -> None:
    asked = mixed(24)
    ours, theirs = run(engine(FAMILY), asked), run(vllm_engine(), asked)
    for one in asked:
        mine, other = ours[one.trajectory_id], theirs[one.trajectory_id]
        assert mine.generated.token_ids.tolist() == other.generated.token_ids.tolist()
        assert np.abs(mine.generated.logprobs - other.generated.logprobs).max() < 1e-4
        assert mine.finish_reason == other.finish_reason


def test_half_a_trajectory_of_ours_goes_on_in_vllm() -> None:
    asked = mixed(6)
    whole, source = run(engine(FAMILY), asked), engine(FAMILY)
    for one in asked:
        source.submit(one)
    done = {each.trajectory_id for _ in range(3) for each in source.step()}
    released = source.release([one.trajectory_id for one in asked])
    left = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id in released]
    resumed = run(vllm_engine(), left)
    assert done | resumed.keys() == whole.keys()
    for name, completion in resumed.items():
        assert completion.generated.token_ids.tolist() == whole[name].generated.token_ids.tolist()


def test_what_the_prefix_cache_has_of_old_weights_is_not_used(tmp_path: Path) -> None:
    save_weights(tiny_model(FAMILY, seed=1), tmp_path / "w")
    asked = [request(i, new=12, prompt=40) for i in range(3)]
    it = vllm_engine()
    before = run(it, asked)
    it.load(tmp_path / "w", PolicyVersion(1, 1))
    ours = engine(FAMILY)
    ours.load(tmp_path / "w", PolicyVersion(1, 1))
    after, expected = run(it, asked), run(ours, asked)
    for name in expected:
        assert after[name].generated.token_ids.tolist() == expected[name].generated.token_ids.tolist()
    assert any(before[name].generated.token_ids.tolist() != after[name].generated.token_ids.tolist() for name in after)
