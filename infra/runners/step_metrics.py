"""Counters and times of named steps, once for Beam (any runner's UI shows them) and for this process's liveness file.

Both have the same source: a step counts here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from infra.runners.liveness import LIVENESS

NAMESPACE = "laminar"


class StepCounters:
    """Counters of one step, by name; created on first use, on any worker."""

    def __init__(self) -> None:
        self._counters: dict[str, Any] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Add `amount` to counter `name`."""
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = _beam_metrics().counter(NAMESPACE, name)
        counter.inc(amount)
        LIVENESS.count(name, amount)

    def __reduce__(self) -> tuple[type[StepCounters], tuple[()]]:
        return StepCounters, ()  # a graph carries no values


class _Phase:
    """Measures one phase of a fold, each time it is entered. A fold runs in one thread at a time."""

    def __init__(self, name: str) -> None:
        self._name = f"{name.replace(' ', '_')}_us"
        self._times = _beam_metrics().distribution(NAMESPACE, self._name)
        self._began = 0

    def __enter__(self) -> None:
        self._began = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        microseconds = (perf_counter_ns() - self._began) // 1000
        self._times.update(microseconds)
        LIVENESS.count(self._name, microseconds)


def _beam_metrics() -> Any:
    from apache_beam.metrics import Metrics  # here: the logic of operators imports this module, and knows no runner

    return Metrics


class _Declared(threading.local):
    phases: Mapping[str, _Phase] | None = None


_DECLARED = _Declared()
_UNMEASURED = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Measures the `with` block as phase `name` of the fold that runs; outside a pipeline it does nothing.

    Raises ValueError if the pipeline's FoldRecords does not name it: its graph would omit a step.
    """
    declared = _DECLARED.phases
    if declared is None:
        return _UNMEASURED
    if name not in declared:
        raise ValueError(f"phase {name!r} is not in the graph: FoldRecords names {', '.join(declared) or 'none'}")
    return declared[name]


class Phases:
    """The phases that a pipeline names for its fold."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._phases: Mapping[str, _Phase] | None = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the phases of the fold that runs in the `with` block."""
        if self._phases is None:
            self._phases = {name: _Phase(name) for name in self.names}
        _DECLARED.phases = self._phases
        try:
            yield
        finally:
            _DECLARED.phases = None

    def __reduce__(self) -> tuple[type[Phases], tuple[tuple[str, ...]]]:
        return Phases, (self.names,)
