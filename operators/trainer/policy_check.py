"""Checks packed logprobs against a model's own plain forward, once, before a learner trusts them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.trainer.packing import PackedTokens, pack_tokens

_LENGTHS = (7, 3, 5)
TOLERANCE = 1e-4
"""How far logprobs may differ, as a share of the largest: rounding in another order stays below it, down a deep model
too; a mask, a position or a scale of the logits that is wrong does not."""


class PlainForward:
    """What `model` says of some random contexts by its own forward; made before its attention is changed."""

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

    def refuse(self, logprobs: Tensor) -> None:
        """Raise ValueError unless `logprobs`, of the targets of `packed`, are those of the plain forward."""
        worst = float((logprobs - self._logprobs).abs().max() / self._logprobs.abs().max())
        if not worst <= TOLERANCE:
            raise ValueError(
                f"packed, its logprobs differ by {worst:.1g} of the largest from those of its own forward: it has more "
                "to it than attention over a sequence's own tokens and an output layer"
            )


def _target_logprobs(logits: Tensor, context: Tensor) -> Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, context[1:, None])[:, 0]
