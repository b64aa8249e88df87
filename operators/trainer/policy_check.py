"""Verifies, once at load time, that a model's packed logprobs equal those of its own forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.trainer.config import Precision
from operators.trainer.packing import PackedTokens, pack_tokens

_LENGTHS = (7, 3, 5)
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Allowed difference of logprobs, relative to the largest. Rounding in another order stays below it, also in deep
models; a wrong mask, position or logit scale does not."""


def contexts(model: PreTrainedModel) -> list[Tensor]:
    """Random contexts for `model`, the same on every rank, int64[n] each."""
    source = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    return [torch.from_numpy(source.integers(0, vocabulary, length)) for length in _LENGTHS]


def packed_contexts(model: PreTrainedModel, device: torch.device) -> PackedTokens:
    """The `contexts` as one packed sequence."""
    later = np.concatenate([np.arange(length) > 0 for length in _LENGTHS])
    return pack_tokens(torch.cat(contexts(model)).numpy(), later, np.array(_LENGTHS), device)


def target_logprobs(logits: Tensor, context: Tensor) -> Tensor:
    """The logprobs of all tokens of `context` but the first, from the `logits` [tokens, vocabulary] of a forward."""
    return logits[:-1].float().log_softmax(-1).gather(1, context[1:, None])[:, 0]


def check_packed(packed: Tensor, plain: Tensor, precision: Precision) -> None:
    """Raise ValueError unless the logprobs `packed` equal `plain`, those of the model's own forward."""
    worst = float((packed - plain).abs().max() / plain.abs().max())
    if not worst <= TOLERANCE[precision]:
        raise ValueError(
            f"its packed logprobs differ from those of its own forward by {worst:.1g} of the largest: the model "
            "has features other than causal attention within a sequence and an output layer"
        )
