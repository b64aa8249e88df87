"""The expected length of a prompt's responses, from its earlier ones, shrunk towards the lengths of all prompts.

Log-lengths are normal around each prompt's mean, and those means around the mean of all (a random-effects model): the
estimate for a prompt weighs its own mean by n / (n + within / between), the empirical Bayes estimate (Efron & Morris,
1975). Without responses it is the mean of all prompts, the same for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthPrior:
    """Log-lengths of all prompts: their mean, and the variances within a prompt and between the prompts' means."""

    mean: float
    within: float
    between: float

    @property
    def share(self) -> float:
        """The share of the variance that is between prompts; 0 if lengths do not vary."""
        total = self.within + self.between
        return self.between / total if total else 0.0


def length_prior(prompts: Iterable[Sequence[int]]) -> LengthPrior:
    """The prior of the response lengths (each ≥ 1) of every prompt, by analysis of variance; zeros without any."""
    logs = [[math.log(length) for length in lengths] for lengths in prompts if lengths]
    count = sum(map(len, logs))
    if not count:
        return LengthPrior(0.0, 0.0, 0.0)
    mean = sum(map(sum, logs)) / count
    means = [sum(each) / len(each) for each in logs]
    free = count - len(logs)
    residual = sum((value - own) ** 2 for each, own in zip(logs, means, strict=True) for value in each)
    within = residual / free if free else 0.0
    if len(logs) < 2:
        return LengthPrior(mean, within, 0.0)
    spread = sum(len(each) * (own - mean) ** 2 for each, own in zip(logs, means, strict=True)) / (len(logs) - 1)
    size = (count - sum(len(each) ** 2 for each in logs) / count) / (len(logs) - 1)
    return LengthPrior(mean, within, max(0.0, (spread - within) / size))


def expected_length(lengths: Sequence[int], prior: LengthPrior) -> float:
    """The expected length of a further response to a prompt whose responses had `lengths`."""
    count = len(lengths)
    noise = prior.within / prior.between if prior.between else math.inf
    weight = count / (count + noise) if count else 0.0
    own = sum(map(math.log, lengths)) / count if count else prior.mean
    mean = prior.mean + weight * (own - prior.mean)
    return math.exp(mean + (prior.within + (1 - weight) * prior.between) / 2)


def longest_first(prompts: Sequence[Sequence[int]], prior: LengthPrior) -> list[int]:
    """The order in which to begin `prompts`, given the lengths of each one's earlier responses: the longest expected
    first, equal ones in their order."""
    expected = [expected_length(lengths, prior) for lengths in prompts]
    return sorted(range(len(prompts)), key=lambda number: -expected[number])
