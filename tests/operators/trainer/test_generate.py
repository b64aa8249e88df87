"""Batched generation equals generation for each prompt alone."""

from __future__ import annotations

import pytest
import torch

from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.trainer.warm_start import generate

PROMPTS = [[5, 6, 7, 8, 9], [40], [12, 13], [200, 201, 202]]
STOP = 1


def model_that_speaks() -> torch.nn.Module:
    """A random model with large weights, so that it does not repeat one token."""
    model, _ = build_demo_model(DemoModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def alone(model: torch.nn.Module, prompt: list[int], stop: int, most: int) -> list[int]:
    """Greedy decoding without cache or padding."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most:
        token = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def test_generate_equals_single_greedy_responses() -> None:
    model = model_that_speaks()
    with torch.inference_mode():
        free = [alone(model, prompt, STOP, 12) for prompt in PROMPTS]
        stop = free[0][4]  # a token that occurs, so that rows end at different steps
        expected = [alone(model, prompt, stop, 12) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=12, stop_token_id=stop) == expected
    assert len(expected[0]) <= 4
    assert max(map(len, expected)) == 12


def test_generate_samples_by_seed() -> None:
    model = model_that_speaks()

    def drawn(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, max_new_tokens=8, stop_token_id=STOP, temperature=1.0, seed=seed)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_generate_samples_follow_the_distribution(temperature: float) -> None:
    model = model_that_speaks()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[7, 8]])).logits[0, -1]
    drawn = generate(model, [[7, 8]] * 4000, max_new_tokens=1, stop_token_id=-1, temperature=temperature)
    shares = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(logits)) / 4000
    distance = {t: float((shares - (logits / t).softmax(-1)).abs().sum()) / 2 for t in (0.5, 1.0, 2.0)}
    assert distance[temperature] < 0.12
    assert min(d for t, d in distance.items() if t != temperature) > 0.2
