"""MapOutputs: a stateless step between a fold and its sink, a pure function of the outputs of one emission.

A fold emits domain values (decisions, events, selected batches); the maps after it turn them into `Output`s, one named
step each. Start, number and checkpoint of an emission stay, so the transaction that the sink writes is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import apache_beam as beam

from infra.runners.liveness import LIVENESS
from infra.runners.step_metrics import ShardCounters
from operators.io.elements import Emission
from schemas.topics import Topic

OutputFunction = Callable[[Sequence[Any]], Sequence[Any]]
"""A pure function of the outputs of one emission. It passes on what it does not know, in its place."""


CountFunction = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, int]]
"""The counters of a step, from the outputs of an emission before and after it."""


class _MapOutputsFn(beam.DoFn):
    def __init__(self, function: OutputFunction, count: CountFunction | None) -> None:
        self._function, self._count = function, count
        self._counters = ShardCounters()

    def process(self, element: Emission) -> Iterator[Emission]:
        if not element.outputs:
            yield element
            return
        with LIVENESS.step(element.group, "fold"):
            mapped = map_emission(element, self._function)
        if self._count is not None:
            self._counters[element.group].add_all(self._count(element.outputs, mapped.outputs))
        del element  # this frame is suspended at the yield: it must not keep the outputs before alive
        yield mapped


class MapOutputs(beam.PTransform):
    """Applies `function` to the outputs of each emission, in order; `count` returns the counters of this step."""

    writes: ClassVar[tuple[Topic, ...]] = ()
    """The topics whose records this step makes, for drawings."""

    def __init__(self, function: OutputFunction, count: CountFunction | None = None) -> None:
        super().__init__()
        self.function, self._count = function, count

    def display_data(self) -> dict[str, str]:
        """The function and the topics of its records, for the runner's interface."""
        names = {"topics": ", ".join(topic.short_name for topic in self.writes)} if self.writes else {}
        return {"function": getattr(self.function, "__name__", type(self.function).__name__), **names}

    def expand(self, emissions: beam.PCollection) -> beam.PCollection:
        return emissions | beam.ParDo(_MapOutputsFn(self.function, self._count))


def map_emission(emission: Emission, function: OutputFunction) -> Emission:
    """`emission` with the outputs that `function` makes of its outputs."""
    return replace(emission, outputs=tuple(function(emission.outputs)))
