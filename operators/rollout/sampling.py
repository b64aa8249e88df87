"""Draws the next token of every running request, with its behaviour logprob.

The uniform of a draw comes from `random_streams`, so a trajectory gets the same tokens in any row, batch or process,
also after a move. The draw inverts the cumulative distribution in float64 and in token order: where another batch
shape changes logits, by ~1e-6, it changes a token only if the uniform is that close to a boundary of the distribution.
"""

from __future__ import annotations

import numpy as np
import torch

from operators.rollout.sampling_columns import NO_TOKEN, SamplingColumns

BLOCK = 1024
"""Tokens of a block of a large vocabulary."""


def sample(logits: torch.Tensor, columns: SamplingColumns, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row; returns token ids int64[rows] and behaviour logprobs float32[rows] in nats.

    `logits` is float[rows, vocabulary], `draws` float64[rows] in [0, 1). The logprob is that of the sampling
    distribution: after temperature, then top-k, then top-p, renormalised. A greedy row (temperature 0) takes the first
    largest logit and reports its log-softmax of the raw logits, because under the sampling distribution its probability
    is 1. Tokens that tie with the last one kept by top-k or top-p are kept too. A row with non-finite logits gets
    NO_TOKEN and NaN.
    """
    drawn, logprobs = draw(logits, columns, draws)
    found, chosen_logprobs = torch.stack((drawn.double(), logprobs)).cpu().numpy()  # one copy; ids are exact in float64
    chosen, broken = found.astype(np.int64), np.isnan(chosen_logprobs)
    return (np.where(broken, NO_TOKEN, chosen) if broken.any() else chosen), chosen_logprobs.astype(np.float32)


def draw(logits: torch.Tensor, columns: SamplingColumns, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample`, on the device of `logits`: token ids int64[rows], logprobs float64[rows], NaN if not finite."""
    scores = logits.double() if columns.temperature is None else logits / _column(columns.temperature, logits)
    if columns.cut is not None:
        scores = _cut(scores, *columns.cut)
    logprobs = scores.log_softmax(-1)
    chosen = _invert(logprobs.exp(), _column(draws, logits))
    if columns.greedy is not None:
        chosen = torch.where(_column(columns.greedy, logits), scores.argmax(-1, keepdim=True), chosen)
    return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


def _invert(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution first exceeds `draws` [rows, 1] of its sum, int64[rows, 1].

    Of a large vocabulary first the block of the token is found, then the token: a GPU sums a long row slowly.
    """
    vocabulary = probabilities.shape[-1]
    if vocabulary <= 2 * BLOCK:
        cumulative = probabilities.cumsum_(-1)
        return _first_above(cumulative, draws * cumulative[:, -1:])
    whole = vocabulary // BLOCK * BLOCK
    sums = probabilities[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < vocabulary:
        sums = torch.cat((sums, probabilities[:, whole:].sum(-1, keepdim=True)), -1)
    ends = sums.cumsum(-1)
    target = draws * ends[:, -1:]
    block = _first_above(ends, target)
    places = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probabilities.gather(1, places.clamp(max=vocabulary - 1)).masked_fill_(places >= vocabulary, 0.0)
    cumulative = inside.cumsum_(-1)
    # The sum over a block rounds otherwise than its last boundary, below which the target must be.
    below_end = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    target = torch.minimum((target - (ends - sums).gather(1, block)).clamp_(min=0.0), below_end)
    return (block * BLOCK + _first_above(cumulative, target)).clamp_(max=vocabulary - 1)


def _first_above(boundaries: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first of rising `boundaries` [rows, n] above `target` [rows, 1].

    A draw is at most 1 - 2^-53, so its product with the sum is below the sum: the boundary belongs to something with
    probability > 0, also at the end. The clamp is for rows that are not finite.
    """
    return torch.searchsorted(boundaries, target, right=True).clamp_(max=boundaries.shape[-1] - 1)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)[:, None]  # a few bytes: copied at once


def _cut(scores: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """Scores with -inf for the tokens dropped by top-k, then by top-p over the rest; float64[rows, vocabulary]."""
    vocabulary = scores.shape[-1]
    ranked = scores.sort(-1, descending=True).values
    kept = _column(np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary), scores)
    ranked = ranked.masked_fill(torch.arange(vocabulary, device=scores.device) >= kept, -torch.inf)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The most likely token is always kept. A row without top-p keeps also tokens after a sum that rounds to 1.
    in_nucleus = (before < _column(top_p, scores)) | _column(top_p >= 1.0, scores)
    kept = torch.minimum(kept, in_nucleus.sum(-1, keepdim=True).clamp_(min=1))
    threshold = ranked.gather(1, kept - 1)
    return scores.masked_fill(scores < threshold, -torch.inf)
