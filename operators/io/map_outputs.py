"""MapOutputs: a stateless step between a fold and its sink, a pure function of the outputs of one emission.

A fold emits domain values (decisions, events, selected batches); the maps after it turn them into `Output`s, one named
step each. Start, number and checkpoint of an emission stay, so the transaction that the sink writes is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import apache_beam as beam

from operators.io.elements import Emission

OutputFunction = Callable[[Sequence[Any]], Sequence[Any]]
"""A pure function of the outputs of one emission. It passes on what it does not know, in its place."""


class _MapOutputsFn(beam.DoFn):
    def __init__(self, function: OutputFunction) -> None:
        self._function = function

    def process(self, element: Emission) -> Iterator[Emission]:
        yield map_emission(element, self._function)


class MapOutputs(beam.PTransform):
    """Applies `function` to the outputs of each emission, in order."""

    def __init__(self, function: OutputFunction) -> None:
        super().__init__()
        self.function = function

    def expand(self, emissions: beam.PCollection) -> beam.PCollection:
        return emissions | beam.ParDo(_MapOutputsFn(self.function))


def map_emission(emission: Emission, function: OutputFunction) -> Emission:
    """`emission` with the outputs that `function` makes of its outputs."""
    return replace(emission, outputs=tuple(function(emission.outputs))) if emission.outputs else emission


def map_outputs(outputs: Sequence[Any], functions: Iterable[OutputFunction]) -> Sequence[Any]:
    """What `functions` make of `outputs`, one after the other."""
    return reduce(lambda made, function: function(made), functions, outputs)
