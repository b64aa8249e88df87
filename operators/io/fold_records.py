"""FoldRecords: a step with a memory, rebuilt from Kafka at every start.

The memory is a plain object of this process, made anew by each `Restored`, so no runner state can be older than what
the sink has committed: a start that a runner replays from an old checkpoint begins with a new session and a new memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import apache_beam as beam

from infra.runners.liveness import LIVENESS
from operators.io.elements import Checkpoint, Emission, Output, Place, Polled, Restored
from schemas.topics import DEAD_LETTERS


class Folder(Protocol):
    """The memory of a step during one start."""

    def fold(self, polled: Polled) -> Sequence[Output]:
        """What is to be written because of `polled`, which may be an idle tick."""

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        """What a restart would need now that everything before `positions` has been folded."""

    def busy(self) -> bool:
        """Whether there is work to do without new input: the source then does not wait for any."""

    def close(self) -> None:
        """Free what the memory holds."""


class Step(Protocol):
    """Makes memories. Frozen and picklable: it travels in the graph."""

    def restore(self, restored: Restored) -> Folder:
        """The memory with which a start begins."""


class _Live:
    __slots__ = ("emissions", "folder", "start")

    def __init__(self, start: int, folder: Folder) -> None:
        self.start = start
        self.folder = folder
        self.emissions = 0


_LIVE: dict[str, _Live] = {}


def is_busy(group: str) -> bool:
    """Whether the step of `group` has work of its own to do."""
    live = _LIVE.get(group)
    return live is not None and live.folder.busy()


def close_folders() -> None:
    """Close every memory of this process."""
    while _LIVE:
        _LIVE.popitem()[1].folder.close()


def _release(group: str) -> None:
    """Close and free the memory of `group`: the next one may be a second model, for which there is no room."""
    if (live := _LIVE.pop(group, None)) is not None:
        live.folder.close()
        del live
        gc.collect()  # models and optimizers hold cycles, and cycles are collected seldom


class _FoldFn(beam.DoFn):
    def __init__(self, step: Step, letters: bool = True) -> None:
        self._step = step
        self._letters = letters

    def process(self, element: Restored | Polled) -> Iterator[Emission]:
        if isinstance(element, Restored):
            _release(element.group)
            with LIVENESS.step(element.group, "restore"):
                _LIVE[element.group] = _Live(element.start, self._step.restore(element))
            return
        live = _LIVE.get(element.group)
        if live is not None and live.start == element.start:
            live.emissions += 1
            rejected = element.rejected if self._letters else ()
            outputs = [Output(DEAD_LETTERS, letter.topic, letter) for letter in rejected]
            with LIVENESS.step(element.group, "fold"):
                outputs += live.folder.fold(element)
                checkpoint = live.folder.checkpoint(element.positions)
            emission = Emission(element.group, element.start, live.emissions, tuple(outputs), checkpoint)
            del live, outputs, checkpoint  # this frame waits at the yield: it must not hold what a new start releases
            yield emission


class FoldRecords(beam.PTransform):
    """Applies `step` to the polls of each shard.

    What could not be decoded becomes a dead letter, unless `letters` is False: the step then tells of it itself.
    """

    def __init__(self, step: Step, letters: bool = True) -> None:
        super().__init__()
        self._step = step
        self._letters = letters

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | beam.ParDo(_FoldFn(self._step, self._letters))
