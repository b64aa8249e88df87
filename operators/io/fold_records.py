"""FoldRecords: a stateful step whose state is rebuilt from Kafka at every start.

The state is a plain object of this process, created by each `Restored`. It is not runner state, so it cannot be older
than what the sink has committed: a runner that replays an old checkpoint begins with a new session and a new object.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

import apache_beam as beam

from infra.clocks import wall_ms
from infra.runners.liveness import LIVENESS
from infra.runners.step_metrics import Phases, ShardCounters
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Emission, Output, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.validation import ManifestOrder, invalid_reason, invalid_rows
from schemas.block import Block
from schemas.records import WeightVersion
from schemas.topics import DEAD_LETTERS

_TOPIC = attrgetter("topic")


class FoldStep(Protocol):
    """Creates the state of each start. Frozen and picklable: it is part of the graph."""

    def restore(self, restored: Restored) -> ShardFold:
        """The state with which a start begins."""


class FoldRunner:
    """Runs a step over the elements of one shard: a fold for each start, dead letters for what cannot be folded."""

    def __init__(
        self,
        step: FoldStep,
        *,
        dead_letters: bool = True,
        phases: Phases | None = None,
        now: Callable[[], int] = wall_ms,
    ) -> None:
        self._step, self._dead_letters, self._phases, self._now = step, dead_letters, phases, now
        self._start, self._emissions = 0, 0
        self._manifests = ManifestOrder()
        self.fold: ShardFold | None = None
        """The fold of the present start; None before the first."""

    def restore(self, restored: Restored) -> None:
        """Create the fold of a start, after `close`."""
        with LIVENESS.step(restored.group, "restore"):
            self.fold = self._step.restore(drop_invalid(restored) if self._dead_letters else restored)
        self._start, self._emissions, self._manifests = restored.start, 0, ManifestOrder(restored.state)

    def apply(self, polled: Polled) -> Emission | None:
        """Fold `polled`; None if it is of another start."""
        if self.fold is None or polled.start != self._start:
            return None
        self._emissions += 1
        undecodable = polled.rejected if self._dead_letters else ()
        outputs: list[Any] = [Output(DEAD_LETTERS, letter.topic, letter) for letter in undecodable]
        if self._dead_letters:
            polled, invalid = reject_invalid(polled, self._manifests, self._now())
            outputs += invalid
        with (
            LIVENESS.step(polled.group, "fold"),
            nullcontext() if self._phases is None else self._phases.measured(polled.group),
        ):
            outputs += self.fold.fold(polled)
            checkpoint = with_manifests(self.fold.checkpoint(polled.positions), self._manifests)
        return Emission(polled.group, polled.start, self._emissions, tuple(outputs), checkpoint, polled.last)

    def close(self) -> None:
        """Close the fold and free it."""
        if self.fold is not None:
            self.fold.close()
            self.fold = None


_RUNNING: dict[str, FoldRunner] = {}


def is_busy(group: str) -> bool:
    """Whether the step of `group` has work without new input."""
    running = _RUNNING.get(group)
    return running is not None and running.fold is not None and running.fold.busy()


def idle_seconds(group: str) -> float:
    """How long the step of `group` has nothing to do without new input: 0 if it is busy, infinite if nothing is due."""
    running = _RUNNING.get(group)
    return math.inf if running is None or running.fold is None else idle_seconds_of(running.fold)


def idle_seconds_of(fold: ShardFold) -> float:
    """As `idle_seconds`, of `fold`. It may have `due`: the seconds until it has a result for which somebody waits."""
    if fold.busy():
        return 0.0
    due: Callable[[], float] | None = getattr(fold, "due", None)
    return math.inf if due is None else due()


def close_folds() -> None:
    """Close every fold of this process."""
    while _RUNNING:
        _RUNNING.popitem()[1].close()


def _release(group: str) -> None:
    """Close and free the fold of `group`: memory would not suffice for its model and the next one's."""
    if (running := _RUNNING.pop(group, None)) is not None:
        running.close()
        del running
        gc.collect()  # models and optimizers contain reference cycles, which are collected rarely


class _FoldFn(beam.DoFn):
    def __init__(self, step: FoldStep, phases: Phases | None = None, dead_letters: bool = True) -> None:
        self._step = step
        self._phases = phases
        self._dead_letters = dead_letters
        self._counters = ShardCounters()

    def display_data(self) -> dict[str, str]:
        return {"step": type(self._step).__name__, "phases": ", ".join(self._phases.names if self._phases else ())}

    def process(self, element: Restored | Polled) -> Iterator[Emission]:
        if isinstance(element, Restored):
            _release(element.group)
            runner = FoldRunner(self._step, dead_letters=self._dead_letters, phases=self._phases)
            runner.restore(element)
            _RUNNING[element.group] = runner
            return
        running = _RUNNING.get(element.group)
        if running is not None and (emission := running.apply(element)) is not None:
            if element.records:
                self._counters[element.group].add_all(Counter(map(_TOPIC, element.records)), "read")
            del running, element  # this frame is suspended at the yield: it must not keep them alive
            yield emission


def reject_invalid(polled: Polled, manifests: ManifestOrder, now: int) -> tuple[Polled, list[Output]]:
    """`polled` without its invalid records (see `validation`), and their dead letters at `now` in Unix milliseconds."""
    reasons: dict[int, str] = {}
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
            reasons[at] = reason
    if not reasons and not rows:
        return polled, []
    letters = []
    for at, reason in reasons.items():
        received = polled.records[at]
        letters.append(dead_letter(received, f"read {received.topic}", reason, now))
    kept = []
    for at, received in enumerate(polled.records):
        if at in rows:
            valid, invalid = _without_rows(received, set(rows[at]), now)
            letters += invalid
            kept += valid
        elif at not in reasons:
            kept.append(received)
    return replace(polled, records=tuple(kept)), letters


def with_manifests(checkpoint: Checkpoint, manifests: ManifestOrder) -> Checkpoint:
    """`checkpoint` with what a restart needs to validate the next manifest."""
    newest = manifests.state()
    return replace(checkpoint, state={**checkpoint.state, **newest}) if newest else checkpoint


def _without_rows(received: ReceivedRecord, rows: set[int], now: int) -> tuple[list[ReceivedRecord], list[Output]]:
    """The received block without `rows` (empty if no row is left), and the dead letters of `rows`."""
    block = received.record
    good = [row for row in range(len(block)) if row not in rows]
    letters = []
    for row in sorted(rows):
        (record,) = block.slice(row, 1).records()
        reason = invalid_reason(record) or "member is not below the samples of its prompt"
        letters.append(dead_letter(received._replace(record=record), f"read {received.topic}", reason, now))
    return ([received._replace(record=block.take(good))] if good else []), letters


def drop_invalid(restored: Restored) -> Restored:
    """`restored` without what cannot be of its ledger; who reads those topics writes the dead letters."""
    kept = tuple(
        each for each in restored.ledger if isinstance(each.record, Block) or invalid_reason(each.record) is None
    )
    return restored if len(kept) == len(restored.ledger) else replace(restored, ledger=kept)


class FoldRecords(beam.PTransform):
    """Applies `step` to the polls of each shard: the only step of a pipeline with a memory.

    `phases` name what it does with a poll, in order; its `phase` blocks are measured under these names. Undecodable and
    invalid records become dead letters. With `dead_letters` False the step receives all of them.
    """

    def __init__(self, step: FoldStep, *phases: str, dead_letters: bool = True) -> None:
        super().__init__()
        self.step, self.phases, self.makes_dead_letters = step, phases, dead_letters

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | beam.ParDo(_FoldFn(self.step, Phases(self.phases), self.makes_dead_letters))
