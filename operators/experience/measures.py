"""What the buffer tells of itself with each batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from operators.experience.groups import Groups
from operators.experience.members import RowRun, gathered
from schemas.records import Metric, Outcome

DECILES = 10
MOST_TASKS = 32
"""So many are told of by name."""


class BufferMeasures:
    """Counts since this start, and the histograms of one batch."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._ended: Counter[int] = Counter()
        self._dropped_lengths: Counter[int] = Counter()

    def drop(self, runs: Sequence[RowRun], reason: str) -> None:
        """Members are dropped for `reason`, whose words before its first number name its kind."""
        lengths = gathered(runs, "tokens")
        self._dropped[kind_of(reason)] += len(lengths)
        _count(self._dropped_lengths, lengths)

    def end(self, runs: Sequence[RowRun], outcome: Outcome) -> None:
        """Members' stories have ended; failed ones say nothing of lengths."""
        if outcome != "failed":
            _count(self._ended, gathered(runs, "tokens"))

    def metric(
        self,
        batch: int,
        runs: Sequence[RowRun],
        ages: np.ndarray,
        groups: Groups,
        others: Mapping[str, float],
        now: int,
    ) -> Metric:
        """Of `batch`: what is held and was dropped; staleness at consumption (`ages`) and at finish as histograms."""
        values = {
            **others,
            "buffer/trajectories": float(groups.held),
            "buffer/groups": float(len(groups)),
            "dropped_stale": float(self._dropped["staleness"]),
            "dropped": float(self._dropped.total()),
            **_histogram("staleness", ages),
            **_histogram("staleness_at_finish", gathered(runs, "finish_staleness")),
        }
        if self._dropped_lengths:
            values |= by_decile(self._ended, self._dropped_lengths)
        return Metric("experience", batch, values, now)


def by_task(runs: Sequence[RowRun]) -> dict[str, float]:
    """Of each task (the `MOST_TASKS` most frequent): trajectories, mean reward, response length and, where it is known,
    accuracy."""
    rows: dict[str, list[tuple[float, float, float | None]]] = defaultdict(list)
    for shelf, first, last in runs:
        figures = zip(
            shelf.rewards[first:last].tolist(),
            shelf.tokens[first:last].tolist(),
            shelf.accuracies[first:last],
            strict=True,
        )
        for task, each in zip(shelf.tasks[first:last], figures, strict=True):
            rows[task].append(each)
    values = {}
    for task in sorted(rows, key=lambda task: -len(rows[task]))[:MOST_TASKS]:
        rewards, tokens, accuracies = zip(*rows[task], strict=True)
        values[f"trajectories/{task}"] = float(len(rewards))
        values[f"reward/mean/{task}"] = fmean(rewards)
        values[f"response_length/mean/{task}"] = fmean(tokens)
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        if known:
            values[f"accuracy/mean/{task}"] = fmean(known)
    return values


def _histogram(name: str, values: np.ndarray) -> dict[str, float]:
    """How often each of `values`, integers, occurs."""
    return {f"{name}/{value}": float(count) for value, count in sorted(Counter(values.tolist()).items())}


def _count(counts: Counter[int], lengths: np.ndarray) -> None:
    for length, count in Counter(lengths.tolist()).items():
        counts[coarse(length)] += count


def kind_of(reason: str) -> str:
    """The first word of a reason."""
    return reason.partition(" ")[0]


def coarse(tokens: int) -> int:
    """A length with at most seven significant bits: at most 64 different ones in each doubling of length."""
    drop = max(0, tokens.bit_length() - 7)
    return tokens >> drop << drop


def by_decile(ended: Mapping[int, int], dropped: Mapping[int, int]) -> dict[str, float]:
    """The share dropped of each tenth of what has ended, by response length; `dropped_share/1` is of the shortest."""
    lengths = sorted(ended)
    counts = np.array([ended[length] for length in lengths], float)
    losses = np.array([dropped.get(length, 0) for length in lengths], float)
    edges = np.concatenate([[0.0], np.cumsum(counts)])
    shares = {}
    for decile in range(DECILES):
        low, high = edges[-1] * decile / DECILES, edges[-1] * (decile + 1) / DECILES
        inside = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)
        shares[f"dropped_share/{decile + 1}"] = float((inside / counts * losses).sum() / (high - low))
    return shares
