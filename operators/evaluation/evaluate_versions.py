"""EvaluateVersions: evaluates chosen weight versions on held-out questions, on the rollout replicas of training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.clocks import wall_ms
from infra.runners.step_metrics import phase
from operators.evaluation.config import EvaluationConfig
from operators.evaluation.report_rounds import GIVEN_UP, NAME, ClosedRound, OpenedRound
from operators.evaluation.rounds import AnnouncedVersion, Mode, Round, modes_due, open_round, round_name
from operators.io.elements import Checkpoint, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.pending import PendingOffsets
from schemas.records import Experience, Metric, PolicyVersion, Prompt, WeightVersion

REPUBLISH_S = 60
"""How long a final version that could not be measured may take to be published again, before its round is given up."""


@dataclass(frozen=True)
class EvaluateVersions:
    """`questions` returns the held-out prompts of this run, in order, with the sampling of training."""

    config: EvaluationConfig
    questions: Callable[[], Sequence[Prompt]]

    def restore(
        self, restored: Restored, clock: Callable[[], float] = time.monotonic, now: Callable[[], int] = wall_ms
    ) -> EvaluationFold:
        return EvaluationFold(self.config, self.questions(), restored, clock, now)


class EvaluationFold(ShardFold):
    """Keeps answers unsettled until their round is complete, so that a restart reads them again.

    The open rounds and their prompt numbers are in every commit note, as a few short entries. A round whose version is
    gone before it is complete ends as not measured. If it is the final one, the trainer may publish that version again;
    after `REPUBLISH_S` its metrics are published again with `given_up`, so that the run can end. A final round with
    too many failed episodes or rewards is given up at once.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        questions: Sequence[Prompt],
        restored: Restored,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
    ) -> None:
        self._config, self._questions, self._clock, self._now = config, questions, clock, now
        self._number, self._last, final, self._lost = restored.state.get("evaluated", (0, None, None, 0))
        """`_lost`: when a round of the final version ended as not measured, in Unix milliseconds; 0: none has.

        Only whether it is 0 counts: a successor may have another clock.
        """
        self._given_up_at = clock() + restored.state.get("republish_s", REPUBLISH_S)
        self._final = PolicyVersion.parse(final) if final else None
        self._rounds: dict[str, Round] = {}
        self._pending = PendingOffsets()
        self._offsets: dict[int, tuple[PartitionKey, int]] = {}
        newest, is_last = restored.state.get("newest", (None, False))
        self._newest = AnnouncedVersion(PolicyVersion.parse(newest), is_last) if newest else None
        self._results = {mode: Metric(NAME, *each) for mode, each in restored.state.get("results", {}).items()}
        """The metrics of the final version, by mode."""
        self._repeat = list(self._results.values())
        """Metrics that a start publishes again: an observer that waits for them reads only the end of the topic."""
        for name, (first, count) in restored.state.get("rounds", {}).items():
            self._rounds[name] = open_round(name, range(first, first + count))

    def fold(self, polled: Polled) -> list[Metric | OpenedRound | ClosedRound]:
        outputs: list[Metric | OpenedRound | ClosedRound] = [*self._repeat]
        self._repeat = []
        with phase("collect answers"):
            for received in polled.records:
                if not isinstance(received.record, WeightVersion):
                    outputs += self._record_answer(received)
                    continue
                announced = AnnouncedVersion(received.record.version, received.record.final)
                if self._newest is None or announced.version > self._newest.version:
                    self._newest = announced
                if announced.version.number == 0:  # always evaluated, however late this process is
                    outputs += self._open_rounds(announced)
        with phase("open rounds"):
            if self._newest is not None and polled.caught_up:
                outputs += self._open_rounds(self._newest)
        return [*outputs, *self._give_up()]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        rounds = {name: [r.expected.start, len(r.expected)] for name, r in self._rounds.items()}
        final = None if self._final is None else str(self._final)
        state: dict[str, Any] = {"evaluated": [self._number, self._last, final, self._lost], "rounds": rounds}
        if self._newest is not None:
            state["newest"] = [str(self._newest.version), self._newest.final]
        if self._lost:
            state["republish_s"] = max(0, math.ceil(self._given_up_at - self._clock()))
        if self._results:
            state["results"] = {mode: [m.step, m.values, m.measured_at] for mode, m in self._results.items()}
        return Checkpoint(self._pending.low_water(positions), state=state)

    def _open_rounds(self, manifest: AnnouncedVersion) -> list[OpenedRound]:
        if not self._questions or (manifest.final and not self._is_new_final(manifest.version)):
            return []
        modes = modes_due(manifest, self._last, self._config, len(self._rounds))
        whole = self._last is None or manifest.final
        opened = [self._open_round(manifest, mode, whole) for mode in modes]
        if modes:
            self._last = max(manifest.version.number, self._last or 0)
            if manifest.final:
                self._final, self._lost, self._results = manifest.version, 0, {}
        return opened

    def _give_up(self) -> list[Metric]:
        """The metrics of final rounds that are not measured, once their version has not been published again."""
        if not self._lost or any(each.final for each in self._rounds.values()):
            return []
        if self._clock() < self._given_up_at:
            return []
        given_up = {
            mode: replace(metric, values={**metric.values, GIVEN_UP: 1.0})
            for mode, metric in self._results.items()
            if f"accuracy/{mode}" not in metric.values and GIVEN_UP not in metric.values
        }
        self._results |= given_up
        return list(given_up.values())

    def _is_new_final(self, version: PolicyVersion) -> bool:
        """Whether final `version` is to be evaluated. A restarted trainer may publish it again, under another epoch."""
        if self._final is None or version.number > self._final.number:  # a resumed run may have a later goal
            return True
        return self._lost > 0 and version > self._final

    def _open_round(self, manifest: AnnouncedVersion, mode: Mode, whole: bool) -> OpenedRound:
        name, first = round_name(manifest.version, mode, manifest.final), self._number
        questions = self._questions if whole else self._questions[: self._config.periodic_questions]
        self._number += len(questions)
        self._rounds[name] = open_round(name, range(first, self._number))
        return OpenedRound(name, manifest.version, mode, first, questions)

    def _record_answer(self, received: ReceivedRecord) -> list[ClosedRound]:
        experience: Experience = received.record
        prompt = experience.trajectory.prompt
        current = self._rounds.get(prompt.round)
        if current is None or prompt.number not in current.expected or prompt.number in current.answers:
            return []
        current.answers[prompt.number] = experience
        self._pending.add(PartitionKey(received.topic, received.partition), received.offset)
        self._offsets[prompt.number] = (PartitionKey(received.topic, received.partition), received.offset)
        return [self._close(current)] if current.complete() else []

    def _close(self, current: Round) -> ClosedRound:
        del self._rounds[current.name]
        for number in current.answers:
            self._pending.remove(*self._offsets.pop(number))
        values = current.values()
        newest_final = current.final and current.version == self._final
        if newest_final and current.is_lost():
            self._lost = self._now()  # lost with its machine; the trainer may publish it again
            self._given_up_at = self._clock() + REPUBLISH_S
        elif newest_final and not current.is_measured():
            values[GIVEN_UP] = 1.0
        metric = Metric(NAME, current.version.number, values, self._now())
        if newest_final:
            self._results[current.mode] = metric
        return ClosedRound(current.name, tuple(current.answers.values()), metric)
