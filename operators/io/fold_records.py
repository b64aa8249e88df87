"""FoldRecords: a step with a memory, rebuilt from Kafka at every start.

The memory is a plain object of this process, made anew by each `Restored`, so no runner state can be older than what
the sink has committed: a start that a runner replays from an old checkpoint begins with a new session and a new memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import apache_beam as beam

from infra.runners.liveness import LIVENESS
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Emission, Output, PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.validation import ManifestOrder, invalid_reason, invalid_rows
from schemas.block import Block
from schemas.records import WeightVersion
from schemas.topics import DEAD_LETTERS


class ShardFold(Protocol):
    """The memory of a step during one start."""

    def fold(self, polled: Polled) -> Sequence[Output]:
        """What is to be written because of `polled`, which may be an idle tick."""

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """What a restart would need now that everything before `positions` has been folded."""

    def busy(self) -> bool:
        """Whether there is work to do without new input: the source then does not wait for any."""

    def close(self) -> None:
        """Free what the memory holds."""


class FoldStep(Protocol):
    """Makes memories. Frozen and picklable: it travels in the graph."""

    def restore(self, restored: Restored) -> ShardFold:
        """The memory with which a start begins."""


class _Live:
    __slots__ = ("emissions", "fold", "manifests", "start")

    def __init__(self, start: int, fold: ShardFold) -> None:
        self.start = start
        self.fold = fold
        self.emissions = 0
        self.manifests = ManifestOrder()


_LIVE: dict[str, _Live] = {}


def is_busy(group: str) -> bool:
    """Whether the step of `group` has work of its own to do."""
    live = _LIVE.get(group)
    return live is not None and live.fold.busy()


def close_folds() -> None:
    """Close every memory of this process."""
    while _LIVE:
        _LIVE.popitem()[1].fold.close()


def _release(group: str) -> None:
    """Close and free the memory of `group`: the next one may be a second model, for which there is no room."""
    if (live := _LIVE.pop(group, None)) is not None:
        live.fold.close()
        del live
        gc.collect()  # models and optimizers hold cycles, and cycles are collected seldom


class _FoldFn(beam.DoFn):
    def __init__(self, step: FoldStep, dead_letters: bool = True) -> None:
        self._step = step
        self._dead_letters = dead_letters

    def process(self, element: Restored | Polled) -> Iterator[Emission]:
        if isinstance(element, Restored):
            _release(element.group)
            if self._dead_letters:
                element = drop_invalid(element)
            with LIVENESS.step(element.group, "restore"):
                _LIVE[element.group] = _Live(element.start, self._step.restore(element))
            return
        live = _LIVE.get(element.group)
        if live is not None and live.start == element.start:
            live.emissions += 1
            undecodable = element.rejected if self._dead_letters else ()
            outputs = [Output(DEAD_LETTERS, letter.topic, letter) for letter in undecodable]
            if self._dead_letters:
                element, strange = reject_invalid(element, live.manifests)
                outputs += strange
            with LIVENESS.step(element.group, "fold"):
                outputs += live.fold.fold(element)
                checkpoint = live.fold.checkpoint(element.positions)
            emission = Emission(element.group, element.start, live.emissions, tuple(outputs), checkpoint)
            del live, outputs, checkpoint  # this frame waits at the yield: it must not hold what a new start releases
            yield emission


def reject_invalid(polled: Polled, manifests: ManifestOrder) -> tuple[Polled, list[Output]]:
    """`polled` without the records that cannot be (see `plausible`), and their dead letters."""
    wrong: dict[int, str] = {}
    rows: dict[int, list[int]] = {}
    for at, (_, _, _, record, _) in enumerate(polled.records):
        if isinstance(record, Block):
            if found := invalid_rows(record):
                rows[at] = found
            continue
        reason = invalid_reason(record)
        if reason is None and isinstance(record, WeightVersion):
            reason = manifests.invalid_reason(record)
        if reason is not None:
            wrong[at] = reason
    if not wrong and not rows:
        return polled, []
    now = time.time_ns() // 10**6
    letters = [
        dead_letter(polled.records[at], f"read {polled.records[at].topic}", why, now) for at, why in wrong.items()
    ]
    kept = []
    for at, received in enumerate(polled.records):
        if at in rows:
            left, strange = _without(received, set(rows[at]), now)
            letters += strange
            kept += left
        elif at not in wrong:
            kept.append(received)
    return replace(polled, records=tuple(kept)), letters


def _without(received: ReceivedRecord, rows: set[int], now: int) -> tuple[list[ReceivedRecord], list[Output]]:
    """A block without `rows`, if any other is left, and the dead letters of these."""
    block = received.record
    good = [row for row in range(len(block)) if row not in rows]
    letters = []
    for row in sorted(rows):
        (record,) = block.part(row, 1).records()
        reason = invalid_reason(record) or "a member that its group does not have"
        letters.append(dead_letter(received._replace(record=record), f"read {received.topic}", reason, now))
    return ([received._replace(record=block.take(good))] if good else []), letters


def drop_invalid(restored: Restored) -> Restored:
    """`restored` without what cannot be of its ledger; who reads those topics writes the dead letters."""
    kept = tuple(
        each for each in restored.ledger if isinstance(each.record, Block) or invalid_reason(each.record) is None
    )
    return restored if len(kept) == len(restored.ledger) else replace(restored, ledger=kept)


class FoldRecords(beam.PTransform):
    """Applies `step` to the polls of each shard.

    Undecodable and invalid records become dead letters. With `dead_letters` False the step receives all of them.
    """

    def __init__(self, step: FoldStep, dead_letters: bool = True) -> None:
        super().__init__()
        self._step = step
        self._dead_letters = dead_letters

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | beam.ParDo(_FoldFn(self._step, self._dead_letters))
