"""A reward by a judge: a frozen second model. Configured as `my_judge.py:likelihood` in this folder.

A verifier process loads the judge once. Give it memory (`score.memory_limit_mb`) and time (`score.time_limit_s`).
"""

import functools
import math


def likelihood(text: str, prompt: str, model: str) -> float:
    """Likelihood of `text` after `prompt` under the model in folder `model`, 0 to 1: the geometric mean over tokens."""
    import torch

    judge, tokenizer = _loaded(model)
    before, tokens = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        return 0.0
    with torch.inference_mode():
        logits = judge(torch.tensor([[*before, *tokens]])).logits[0, len(before) - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return math.exp(logprobs.mean().item())


@functools.lru_cache(maxsize=1)
def _loaded(model: str):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
