"""Draws the next token of every running request, with its behaviour logprob.

The uniform of a draw comes from `random_streams`, so a trajectory gets the same tokens in any row, batch or process,
also after a move. The draw inverts the cumulative distribution in float64 and in token order: where another batch
shape changes logits, by ~1e-6, it changes a token only if the uniform is that close to a boundary of the distribution.
"""

from __future__ import annotations

import numpy as np
import torch

from operators.rollout.sampling_columns import NO_TOKEN, SamplingColumns


def sample(logits: torch.Tensor, columns: SamplingColumns, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row; returns token ids int64[rows] and behaviour logprobs float32[rows] in nats.

    `logits` is float[rows, vocabulary], `draws` float64[rows] in [0, 1). The logprob is that of the sampling
    distribution: after temperature, then top-k, then top-p, renormalised. A greedy row (temperature 0) takes the first
    largest logit and reports its log-softmax of the raw logits, because under the sampling distribution its probability
    is 1. Tokens that tie with the last one kept by top-k or top-p are kept too. A row with non-finite logits gets
    NO_TOKEN and NaN.
    """
    chosen, chosen_logprobs = (each.cpu().numpy() for each in draw(logits, columns, draws))
    broken = np.isnan(chosen_logprobs)
    return (np.where(broken, NO_TOKEN, chosen) if broken.any() else chosen), chosen_logprobs.astype(np.float32)


def draw(logits: torch.Tensor, columns: SamplingColumns, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample`, on the device of `logits`: token ids int64[rows], logprobs float64[rows], NaN if not finite."""
    scores = logits.double() if columns.temperature is None else logits / _column(columns.temperature, logits)
    if columns.cut is not None:
        scores = _cut(scores, *columns.cut)
    logprobs = scores.log_softmax(-1)
    cumulative = logprobs.exp().cumsum_(-1)
    # A draw is at most 1 - 2^-53, so its product with the sum is below the sum: the first boundary above it belongs to
    # a token with probability > 0, also at the end. The clamp is for rows that are not finite.
    target = _column(draws, logits) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if columns.greedy is not None:
        chosen = torch.where(_column(columns.greedy, logits), scores.argmax(-1, keepdim=True), chosen)
    return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _cut(scores: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """Scores with -inf for the tokens dropped by top-k, then by top-p over the rest; float64[rows, vocabulary]."""
    vocabulary = scores.shape[-1]
    ranked = scores.sort(-1, descending=True).values
    kept = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)).to(scores.device)
    ranked = ranked.masked_fill(torch.arange(vocabulary, device=scores.device) >= kept[:, None], -torch.inf)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The most likely token is always kept. A row without top-p keeps also tokens after a sum that rounds to 1.
    in_nucleus = (before < _column(top_p, scores)) | torch.from_numpy(top_p >= 1.0).to(scores.device)[:, None]
    kept = torch.minimum(kept, in_nucleus.sum(-1).clamp_(min=1))
    threshold = ranked.gather(1, kept[:, None] - 1)
    return scores.masked_fill(scores < threshold, -torch.inf)
