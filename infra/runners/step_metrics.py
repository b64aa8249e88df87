"""Counters and times of named steps: the only place that counts.

Beam's metrics (any runner's interface shows them), the liveness file of the process and the metrics of the run
(`operators/io/write_transactionally.py`, and the metrics of each role) have their values from here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from infra.runners.liveness import LIVENESS

NAMESPACE = "laminar"
TIME = "time_us/"
"""Prefix of the counters that measure phases, in microseconds."""
WAITING = "waiting"
"""The gauge of outputs that wait for a transaction."""


class StepCounters:
    """Counts for one step of the shard `group`. A name is a kind, or a kind and a label: `moved/repack`.

    `totals` are those of this object; they continue from `earlier`, such as those of a commit note.
    """

    def __init__(self, group: str, earlier: Mapping[str, int] | None = None) -> None:
        self.totals = Counter(earlier or {})
        self._group = group
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}

    def set_gauge(self, name: str, value: int) -> None:
        """Show `value` in Beam's metrics, until the next one."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = _beam_metrics().gauge(NAMESPACE, name)
        gauge.set(value)

    def add(self, name: str, amount: int = 1) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = _beam_metrics().counter(NAMESPACE, name)
        counter.inc(amount)
        self.totals[name] += amount
        LIVENESS.count(self._group, name, amount)

    def add_all(self, amounts: Mapping[str, int], kind: str = "") -> None:
        """Add `amounts` by name, or by label of `kind`."""
        for name, amount in amounts.items():
            self.add(f"{kind}/{name}" if kind else name, amount)


class ShardCounters(dict[str, StepCounters]):
    """The counters of one step for each shard, by group; of a worker, not of a graph, which carries no values."""

    def __missing__(self, group: str) -> StepCounters:
        counters = self[group] = StepCounters(group)
        return counters

    def __reduce__(self) -> tuple[type[ShardCounters], tuple[()]]:
        return ShardCounters, ()


class Stopwatch:
    """Measures a `with` block: `seconds`, once it has ended."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = perf_counter_ns()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = (perf_counter_ns() - self._began) / 1e9


class _Phase(Stopwatch):
    """Measures one phase of a fold, each time it is entered. A fold runs in one thread at a time."""

    def __init__(self, group: str, name: str) -> None:
        self._group = group
        self._name = TIME + name
        self._times = _beam_metrics().distribution(NAMESPACE, self._name)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        microseconds = int(self.seconds * 1e6)
        self._times.update(microseconds)
        LIVENESS.count(self._group, self._name, microseconds)


def _beam_metrics() -> Any:
    from apache_beam.metrics import Metrics  # here: the logic of operators imports this module, and knows no runner

    return Metrics


class _Declared(threading.local):
    phases: Mapping[str, _Phase] | None = None


_DECLARED = _Declared()


def phase(name: str) -> Stopwatch:
    """Measures the `with` block as phase `name` of the fold that runs; outside a pipeline nothing is counted.

    Raises ValueError if the pipeline's FoldRecords does not name it: its graph would omit a step.
    """
    declared = _DECLARED.phases
    if declared is None:
        return Stopwatch()
    if name not in declared:
        raise ValueError(f"phase {name!r} is not in the graph: FoldRecords names {', '.join(declared) or 'none'}")
    return declared[name]


class Phases:
    """The phases that a pipeline names for its fold."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._phases: dict[str, Mapping[str, _Phase]] = {}

    @contextmanager
    def measured(self, group: str) -> Iterator[None]:
        """Measure the phases of the fold of the shard `group`, which runs in the `with` block."""
        if group not in self._phases:
            self._phases[group] = {name: _Phase(group, name) for name in self.names}
        _DECLARED.phases = self._phases[group]
        try:
            yield
        finally:
            _DECLARED.phases = None

    def __reduce__(self) -> tuple[type[Phases], tuple[tuple[str, ...]]]:
        return Phases, (self.names,)
