"""The metrics that the buffer reports with each batch, and while none can be filled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from infra.runners.step_metrics import StepCounters
from operators.experience.groups import Groups
from operators.experience.members import ACCURACY, RowRun, gather_column
from schemas.metric_labels import (
    COMPONENT,
    COMPONENT_MEAN,
    COMPONENT_TRAJECTORIES,
    DROPPED_SINCE_BATCH,
    LEFT_OUT,
    UNFILLED_BATCHES,
    labelled,
)
from schemas.records import Metric, Outcome
from schemas.scalars import LARGEST_REWARD

DECILES = 10
MAX_TASKS = 32
"""How many tasks have metrics of their own, at most."""
MAX_REASON = 120
"""Characters of a reason in a metric."""
MAX_COMPONENTS = 32
"""How many reward components have metrics of their own, at most."""


class BufferMetrics:
    """Counters since this start of the shard `group`, and the histograms of one batch."""

    def __init__(self, group: str) -> None:
        self._counters = StepCounters(group)
        self._settled_lengths: Counter[int] = Counter()
        self._dropped_lengths: Counter[int] = Counter()
        self._arrived = 0
        self._dropped_since_batch, self._reason = 0, ""

    def count_arrived(self, count: int) -> None:
        """Count members that have arrived since the last metric."""
        self._arrived += count

    def count_dropped(self, runs: Sequence[RowRun], reason: str) -> None:
        """Count the members in `runs`, dropped for `reason`."""
        lengths = gather_column(runs, "tokens")
        self._counters.add(f"dropped/{reason.partition(' ')[0]}", len(lengths))  # its first word is its kind
        self._dropped_since_batch, self._reason = self._dropped_since_batch + len(lengths), reason
        _count(self._dropped_lengths, lengths)

    def count_settled(self, runs: Sequence[RowRun], outcome: Outcome) -> None:
        """Count settled members by outcome, and their lengths; failed ones have no meaningful length."""
        self._counters.add(f"settled/{outcome}", sum(last - first for _, first, last in runs))
        if outcome != "failed":
            _count(self._settled_lengths, gather_column(runs, "tokens"))

    def metric(
        self,
        batch: int,
        runs: Sequence[RowRun],
        staleness: np.ndarray,
        groups: Groups,
        others: Mapping[str, float],
        now: int,
    ) -> Metric:
        """The metric of `batch`: what is held and was dropped, and histograms of `staleness` (at consumption) and of
        staleness at finish."""
        self._dropped_since_batch = 0
        values = {
            **others,
            **self._buffer_values(batch + 1, groups),
            **_histogram("staleness", staleness),
            **_histogram("staleness_at_finish", gather_column(runs, "finish_staleness")),
        }
        return Metric("experience", batch, values, now)

    def unfilled_metric(
        self, batch: int, global_batch: int, groups: Groups, left_out: int, others: Mapping[str, float], now: int
    ) -> Metric | None:
        """The metric before `batch` if a batch's worth of members has arrived since the last one, and as many were
        dropped since the last batch or are `left_out` by the sampler. That of the batch replaces it."""
        dropped = self._dropped_since_batch
        if self._arrived < global_batch or max(dropped, left_out) < global_batch:
            return None
        values = {**others, **self._buffer_values(batch, groups), LEFT_OUT: float(left_out)}
        if dropped:
            values[labelled(DROPPED_SINCE_BATCH, text=self._reason[:MAX_REASON])] = float(dropped)
            values[UNFILLED_BATCHES] = float(dropped // global_batch)
        return Metric("experience", batch, values, now)

    def _buffer_values(self, batches: int, groups: Groups) -> dict[str, float]:
        self._arrived = 0
        dropped = {name: count for name, count in self._counters.totals.items() if name.startswith("dropped/")}
        values = {
            "batches": float(batches),
            "buffer/trajectories": float(groups.held),
            "buffer/groups": float(len(groups)),
            "dropped_stale": float(dropped.get("dropped/staleness", 0)),
            "dropped": float(sum(dropped.values())),
        }
        if self._dropped_lengths:
            values |= dropped_share_by_decile(self._settled_lengths, self._dropped_lengths)
        return values


def by_task(runs: Sequence[RowRun]) -> dict[str, float]:
    """For each of the `MAX_TASKS` most frequent tasks: trajectories, mean reward, mean response length, and mean
    accuracy if there is one."""
    rows: dict[str, list[tuple[float, float, float | None]]] = defaultdict(list)
    for block, first, last in runs:
        each_row = zip(
            block.rewards[first:last].tolist(),
            block.tokens[first:last].tolist(),
            block.accuracies[first:last],
            strict=True,
        )
        for task, each in zip(block.tasks[first:last], each_row, strict=True):
            rows[task].append(each)
    values: dict[str, float] = {}
    for task in sorted(rows, key=lambda task: -len(rows[task]))[:MAX_TASKS]:
        rewards, tokens, accuracies = zip(*rows[task], strict=True)
        figures = {
            "trajectories": float(len(rewards)),
            "reward/mean": fmean(rewards),
            "response_length/mean": fmean(tokens),
        }
        measured = [accuracy for accuracy in accuracies if accuracy is not None and abs(accuracy) <= LARGEST_REWARD]
        if measured:
            figures["accuracy/mean"] = fmean(measured)
        values |= {labelled(name, task=task): figure for name, figure in figures.items()}
    return values


def by_component(runs: Sequence[RowRun]) -> dict[str, float]:
    """For each of the `MAX_COMPONENTS` most frequent reward components: its mean before weighting, and the number of
    trajectories that have it. Accuracy is in `by_task`."""
    found: dict[str, list[float]] = defaultdict(list)
    for block, first, last in runs:
        for name, value in block.components.between(first, last):
            if abs(value) <= LARGEST_REWARD:  # larger ones, of imported rows, may have no mean
                found[name].append(value)
    found.pop(ACCURACY, None)
    values: dict[str, float] = {}
    for name in sorted(found, key=lambda name: -len(found[name]))[:MAX_COMPONENTS]:
        label = {COMPONENT: name}
        values[labelled(COMPONENT_MEAN, **label)] = fmean(found[name])
        values[labelled(COMPONENT_TRAJECTORIES, **label)] = float(len(found[name]))
    return values


def _histogram(name: str, values: np.ndarray) -> dict[str, float]:
    """How often each of `values` (integers) occurs."""
    return {f"{name}/{value}": float(count) for value, count in sorted(Counter(values.tolist()).items())}


def _count(counts: Counter[int], lengths: np.ndarray) -> None:
    for length, count in Counter(lengths.tolist()).items():
        counts[round_length(length)] += count


def round_length(tokens: int) -> int:
    """`tokens` rounded down to seven significant bits: at most 64 values in each doubling of length."""
    shift = max(0, tokens.bit_length() - 7)
    return tokens >> shift << shift


def dropped_share_by_decile(settled: Mapping[int, int], dropped: Mapping[int, int]) -> dict[str, float]:
    """The share of dropped trajectories in each decile of the settled ones by response length, shortest first.

    Both arguments are counts by length.
    """
    lengths = sorted(settled)
    counts = np.array([settled[length] for length in lengths], float)
    losses = np.array([dropped.get(length, 0) for length in lengths], float)
    edges = np.concatenate([[0.0], np.cumsum(counts)])
    shares = {}
    for decile in range(DECILES):
        low, high = edges[-1] * decile / DECILES, edges[-1] * (decile + 1) / DECILES
        inside = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)
        shares[f"dropped_share/{decile + 1}"] = float((inside / counts * losses).sum() / (high - low))
    return shares
