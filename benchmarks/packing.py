"""Packed against padded micro-batches: seconds for forward and backward over one batch of 128 sequences, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

Both sort by length and cut to the same token budget; both compute logits of response tokens only. `padded` counts
padding as tokens and runs the model's own attention; `packed` arranges only attention in rows. Lengths are drawn like
those of the two demonstration tasks: sums (23 ± 5 response tokens) and greatest common divisors (long-tailed, median
39, at most 200).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.trainer.packed_attention import PACKED
from operators.trainer.packing import pack_tokens, plan_micro_batches
from operators.trainer.policy import token_logprobs

_SEQUENCES = 128
_CHUNK = 1 << 20


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--layers", type=int, default=3)
    arguments.add_argument("--repetitions", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    model, _ = build_demo_model(DemoModelConfig(layers=options.layers))
    passes: dict[str, Callable[..., None]] = {"padded": padded, "packed": packed}
    print(f"{'lengths':8} {'budget':>7}   seconds: " + "   ".join(f"{name} (median, min)" for name in passes))
    for kind in ("sums", "divisors"):
        prompts, responses = draw(kind)
        for budget in (512, 1024, 2048, 4096):
            seconds: dict[str, list[float]] = {name: [] for name in passes}
            for _ in range(options.repetitions):  # alternating, so that other work on the machine affects both
                for name, run_pass in passes.items():
                    model.set_attn_implementation("sdpa" if name == "padded" else PACKED)
                    model.zero_grad()
                    started = time.process_time()
                    run_pass(model, prompts, responses, budget)
                    seconds[name].append(time.process_time() - started)
            figures = "   ".join(f"{statistics.median(each):.3f} {min(each):.3f}" for each in seconds.values())
            print(f"{kind:8} {budget:7d}   {figures}", flush=True)


def draw(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response lengths of a batch."""
    source = np.random.default_rng(0)
    if kind == "sums":
        return source.integers(7, 12, _SEQUENCES), source.normal(23, 5, _SEQUENCES).clip(4, 41).astype(int)
    return np.full(_SEQUENCES, 7), source.lognormal(np.log(39), 0.6, _SEQUENCES).clip(4, 200).astype(int)


def packed(model: PreTrainedModel, prompts: np.ndarray, responses: np.ndarray, budget: int) -> None:
    """One pass over packed micro-batches, built as the learner builds them."""
    lengths = prompts + responses
    for rows in plan_micro_batches(lengths, np.arange(len(lengths)), budget):
        mask = np.concatenate([np.arange(lengths[row]) >= prompts[row] for row in rows])
        tokens = pack_tokens(np.full(len(mask), 7), mask, lengths[rows], torch.device("cpu"))
        logprobs, _ = token_logprobs(model, tokens, _CHUNK)
        torch.autograd.backward(logprobs.sum())


def padded(model: PreTrainedModel, prompts: np.ndarray, responses: np.ndarray, budget: int) -> None:
    """One pass over padded micro-batches. Padding is on the right, so a causal model needs no mask."""
    lengths = prompts + responses
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        count = max(1, budget // int(lengths[order[0]]))
        rows, order = order[:count], order[count:]
        width = int(lengths[rows].max())
        token_ids = torch.full((len(rows), width), 7)
        position = np.arange(width - 1)
        first, last = prompts[rows, None] - 1, lengths[rows, None] - 1
        predicting = torch.from_numpy((position >= first) & (position < last))
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1][predicting]
        logprobs = model.get_output_embeddings()(hidden).log_softmax(-1)
        torch.autograd.backward(logprobs.gather(1, token_ids[:, 1:][predicting][:, None]).sum())


if __name__ == "__main__":
    main()
