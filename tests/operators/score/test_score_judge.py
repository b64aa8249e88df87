"""A frozen model as a judge, in a verifier process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.score.attempt import AnswerContext
from operators.score.config import RewardSpec, ScoreConfig
from operators.score.scorer import Scorer

JUDGE = str(Path(__file__).parents[3] / "examples" / "my_judge.py:likelihood")


@pytest.mark.slow
def test_judge_model_rewards_by_likelihood(tmp_path: Path) -> None:
    model, tokenizer = build_demo_model(DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48))
    save_folder(model, tokenizer, tmp_path / "judge")
    reward = RewardSpec(JUDGE, options={"model": str(tmp_path / "judge")})
    config = ScoreConfig(rewards=(reward,), workers=1, time_limit_s=120.0, memory_limit_mb=16_384)
    with Scorer(config) as scorer:
        results = scorer.judge([AnswerContext(text, 3, "2 + 2 =", "sums", "{}") for text in ("4", "#4", "")])
    values = [result[0].value for result in results]
    assert values[2] == 0.0
    tokens = tokenizer.encode("2 + 2 =#4")
    with torch.inference_mode():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = math.exp(sum(float(logprobs[at - 1, tokens[at]]) for at in (-2, -1)) / 2)
    assert values[1] is not None
    assert math.isclose(values[1], expected, rel_tol=1e-4)
