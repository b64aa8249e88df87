"""Verifies, once at load time, that a model's packed logprobs equal those of its own forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.trainer.packing import PackedTokens, pack_tokens

_LENGTHS = (7, 3, 5)
TOLERANCE = 1e-4
"""Allowed difference of logprobs, relative to the largest. Rounding in another order stays below it, also in deep
models; a wrong mask, position or logit scale does not."""


class PlainForward:
    """Logprobs of random contexts by the model's own forward, computed before its attention is replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        source = np.random.default_rng(0)
        vocabulary = model.get_input_embeddings().num_embeddings
        contexts = [torch.from_numpy(source.integers(0, vocabulary, length)) for length in _LENGTHS]
        with torch.inference_mode():
            self._logprobs = torch.cat(
                [_target_logprobs(model(input_ids=each[None]).logits[0], each) for each in contexts]
            )
        lengths = np.array(_LENGTHS)
        later = np.concatenate([np.arange(length) > 0 for length in _LENGTHS])
        self.packed: PackedTokens = pack_tokens(torch.cat(contexts).numpy(), later, lengths, torch.device("cpu"))

    def check(self, logprobs: Tensor) -> None:
        """Raise ValueError unless `logprobs` of the targets of `packed` equal those of the plain forward."""
        worst = float((logprobs - self._logprobs).abs().max() / self._logprobs.abs().max())
        if not worst <= TOLERANCE:
            raise ValueError(
                f"its packed logprobs differ from those of its own forward by {worst:.1g} of the largest: the model "
                "has features other than causal attention within a sequence and an output layer"
            )


def _target_logprobs(logits: Tensor, context: Tensor) -> Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, context[1:, None])[:, 0]
