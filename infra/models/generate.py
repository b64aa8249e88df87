"""Generates responses to many prompts in one padded batch, to evaluate a causal language model.

It is simple, not fast: the rollout's engine is the fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_id: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """The response to each prompt: token ids before `stop_token_id`, at most `max_new_tokens`.

    Temperature 0 is greedy; otherwise tokens are sampled from the whole distribution with a generator of `seed`.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    width = max(map(len, prompts))
    token_ids = torch.tensor([[stop_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    token_ids, mask = token_ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    running = torch.arange(len(prompts), device=model.device)
    responses: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        output = model(
            input_ids=token_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        logits = output.logits[:, -1].float()
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        continues = drawn != stop_token_id
        for row, token in zip(running[continues].tolist(), drawn[continues].tolist(), strict=True):
            responses[row].append(token)
        if not continues.any():
            break
        if not continues.all():
            cache.batch_select_indices(continues.nonzero()[:, 0])
            running, mask, positions = running[continues], mask[continues], positions[continues]
        token_ids = drawn[continues, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = positions[:, -1:] + 1
    return responses
