"""Checks a runner against the model's own forward, once, before an engine uses it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from operators.rollout.runner import Runner
from operators.rollout.step_plan import Decode, plan_prefill

_LENGTHS = (7, 3, 5)
_STEPS = 3


def tolerance(dtype: torch.dtype) -> float:
    """The largest accepted difference of logits, relative to the largest logit.

    Kernels that sum in another order differ by less, also in deep models; a wrong mask, position or scale by more.
    """
    return max(1e-4, 6 * torch.finfo(dtype).eps)


def max_logit_difference(runner: Runner, model: PreTrainedModel, rows: int, context: int) -> float:
    """The largest difference of logits between `runner` and `model(...)`, relative to the largest logit.

    Runs up to three random contexts of different lengths in the first KV rows: a prefill, a few decode steps, and
    another prefill in the same pass as a decode step. Uses the model's present weights; the rows' KV is not cleared.
    """
    generator = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    lengths = [length for length in _LENGTHS if length + _STEPS <= context][:rows]
    contexts = [generator.integers(0, vocabulary, length + _STEPS) for length in lengths]
    device = model.device
    with torch.inference_mode():
        plain = [model(input_ids=torch.from_numpy(context)[None].to(device)).logits[0] for context in contexts]
        worst = 0.0
        late = len(contexts) - 1 if len(contexts) > 1 else None  # joins one step after the others
        for step in range(_STEPS):
            joining = [row for row in range(len(contexts)) if (step == 1) == (row == late) and step < 2]
            running = [row for row in range(len(contexts)) if row != late or step]
            at = [lengths[row] - 1 + step for row in running]
            blocks = plan_prefill([contexts[row][: lengths[row] - 1 + step] for row in joining], joining, 1 << 20)
            token_ids = np.array([contexts[row][position] for row, position in zip(running, at, strict=True)])
            logits = runner.decode(Decode(token_ids, np.array(at)), blocks)
            for row, position, got in zip(running, at, logits, strict=True):
                expected = plain[row][position]
                worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    return worst if np.isfinite(worst) else float("inf")
