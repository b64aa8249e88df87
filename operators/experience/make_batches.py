"""MakeBatches: the streaming experience buffer. Experiences in, global batches out, each settled as it leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from operators.experience.batch_context import BatchContext
from operators.experience.config import ExperienceConfig
from operators.experience.curriculum import Curricula, Curriculum
from operators.experience.endings import Endings
from operators.experience.groups import Group, Groups
from operators.experience.measures import BufferMeasures, by_task
from operators.experience.members import ExperienceBlock, GroupMember, RowRun, ages, runs_of
from operators.experience.packing import pack
from operators.experience.prompt_order import PromptOrder
from operators.experience.sharing import Sharing
from operators.experience.trainable import ANY_TOKEN, Verdict, untrainable
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.pending import PendingOffsets
from schemas.records import (
    BatchProposal,
    BatchSelection,
    LevelReply,
    LevelSuccess,
    Outcome,
    PolicyVersion,
    WeightVersion,
)
from schemas.topics import (
    BATCH_ASSEMBLY,
    BATCHES,
    CURRICULUM,
    EXPERIENCES,
    LEVEL_REQUEST,
    METRICS,
    SETTLED,
    SUCCESS,
    parts_of_rank,
)

log = logging.getLogger(__name__)

BATCHES_A_FOLD = 4
"""How many batches leave together: those that are ready beyond them are packed while these are sent."""


@dataclass(frozen=True)
class MakeBatches:
    """A global batch leaves in one transaction: its micro-batches, a Settled for each member, and the low-water mark.

    A batch has `global_batch` trajectories at least, all of which can be trained; what cannot is settled as it comes
    (and is a dead letter where it is no failure but nonsense), and its group completes without it. Staleness is
    measured here, at consumption: newest announced version minus the version that generated. `partitions` of the topics
    keyed by group, of which this `shard` of `config.shards` has its own (see `sharing`), `ranks` of the trainer,
    `levels` of the curriculum of each task that has one, `vocabulary` of the model in tokens (None: the trainer alone
    finds what it does not know, at the cost of a batch).
    """

    config: ExperienceConfig
    partitions: int
    ranks: int = 1
    levels: Mapping[str, int] = field(default_factory=dict)
    vocabulary: int | None = None
    shard: int = 0

    def restore(self, restored: Restored) -> _Buffering:
        endings = Endings.restored(restored, self.partitions, self.shard, self.config.shards)
        curricula = Curricula(self.levels, restored.state.get("curriculum"))
        return _Buffering(self, endings, curricula, restored.state)


class _Buffering:
    """What is held is in the log from the low-water mark on; what is settled, in the ledger of endings."""

    def __init__(
        self,
        step: MakeBatches,
        endings: Endings,
        curricula: Curricula,
        state: Mapping[str, Any],
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._ranks = step.config, step.ranks
        self._vocabulary = step.vocabulary or ANY_TOKEN
        self._writers = step.config.make_writers()
        self._sampler = step.config.make_sampler()
        self._turns = PromptOrder(endings) if step.config.over_age == "wait" else None
        self._evictions = step.config.make_evictions()
        self._endings, self._curricula = endings, curricula
        self._now, self._clock = now, clock
        self._batch = state.get("batch", 0)
        self._sharing = Sharing(
            step.shard, step.config.shards, step.partitions, step.config.global_batch, bool(self._evictions), state
        )
        self._groups = Groups()
        self._pending = PendingOffsets()
        newest = state.get("newest")
        self._newest = PolicyVersion.parse(newest) if newest else None
        self._measures = BufferMeasures()
        self._letters: list[Output] = []
        self._more = False

    def fold(self, polled: Polled) -> list[Output]:
        self._endings.begin()
        for received in polled.records:
            if isinstance(received.record, WeightVersion):
                self._newest = max(filter(None, (self._newest, received.record.version)))
            elif isinstance(received.record, LevelReply):
                self._curricula.learn(received.record)
            elif isinstance(received.record, BatchProposal | BatchSelection):
                self._sharing.learn(received)
            elif isinstance(received.record, LevelSuccess):
                self._curricula.hear(received.record, self._sharing.shard)
            else:
                self._take_in(received)
        outputs: list[Output] = []
        if polled.caught_up:
            self._end_waiting()
            outputs += self._answer_calls()
            if polled.records:
                self._evict()
            outputs += self._make_batches() if self._sharing.shards == 1 else self._offer()
            outputs += self._ask()
        letters, self._letters = self._letters, []
        settled = self._endings.settled(self._now())
        return [*letters, *outputs, *([Output(SETTLED, "", settled)] if settled is not None else [])]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(
            low_water=self._pending.low_water(positions) | self._sharing.low_water(positions),
            ledger_from=self._endings.oldest_emission(),
            state={
                "settled": self._endings.state(),
                "batch": self._batch,
                "newest": None if self._newest is None else str(self._newest),
                **self._curricula.state(),
                **self._sharing.state(),
            },
        )

    def busy(self) -> bool:
        return self._more

    def close(self) -> None:
        pass

    # -- what enters --------------------------------------------------------------------------------------------------

    def _take_in(self, received: ReceivedRecord) -> None:
        place = PartitionKey(received.topic, received.partition)
        shelf = ExperienceBlock(received.record, received.partition, received.offset)
        now = self._clock()
        wrong = untrainable(shelf, self._vocabulary)
        all_may = not wrong and not self._writers and self._turns is None
        for number, run in RowRun(shelf, 0, len(shelf)).by_group():
            fresh = self._endings.expect(number, shelf.members[run.first : run.last])  # others came before, or twice
            if not fresh:
                continue
            self._pending.add(place, received.offset, len(fresh))
            members = [GroupMember(shelf, run.first + position) for position in fresh]
            if not all_may or self._endings.has_left(number):
                members = [member for member in members if self._may_enter(member, wrong)]
            if members:
                self._groups.add(number, members, now)
            answered = self._endings.answered(number)
            group = self._groups.complete(number, shelf.sizes[run.first], answered, self._batch)
            if group is not None:
                self._judge(group)

    def _may_enter(self, member: GroupMember, wrong: Mapping[int, Verdict]) -> bool:
        """Whether `member` may; its story ends here if not. `wrong` is what cannot be trained of its shelf."""
        if self._endings.has_left(member.number):
            self._drop([member], "its group had left")
        elif (verdict := wrong.get(member.row)) is not None:
            self._settle(list(runs_of([member])), "failed", verdict.reason)
            if verdict.nonsense:
                self._letters.append(self._letter(member, verdict.reason))
        elif self._turns is not None and member.number < 0:
            self._drop([member], "imported: over_age = wait trains what has a place in the order of prompts alone")
        elif (refusal := self._refusal(member)) is not None:
            self._drop([member], refusal)
        else:
            return True
        return False

    def _letter(self, member: GroupMember, reason: str) -> Output:
        shelf = member.shelf
        received = ReceivedRecord(EXPERIENCES.noun, shelf.partition, shelf.offset, member.experience())
        return dead_letter(received, "make batches", f"{member.trajectory_id}: {reason}", self._now())

    def _refusal(self, member: GroupMember) -> str | None:
        return next(filter(None, (writer.refuse(member) for writer in self._writers)), None)

    def _judge(self, group: Group) -> None:
        """A group that waits for nobody any more is ready, or is refused for good; unless a start before offered it."""
        if group.number in self._sharing.offered:
            self._groups.keep(group)
            return
        reason = self._sampler.refuse(group)
        if reason is None:
            self._groups.make_ready(group)
        else:
            self._drop(group.members, reason, left={group.number})

    def _end_waiting(self) -> None:
        """Let go of the groups that have waited too long for their members."""
        if not self._config.group_timeout_s:
            return
        due = self._clock() - self._config.group_timeout_s
        waited = [number for number, group in self._groups.open.items() if group.seen_at <= due]
        for number in waited:
            group = self._groups.close(number, self._batch)
            self._endings.leave(number)
            if self._config.partial_groups == "train":
                self._judge(group)
            else:
                lacking = f"{len(group.members)} of {group.expected} members came"
                self._drop(group.members, f"{lacking} in {self._config.group_timeout_s:g} s", left={number})

    # -- what is dropped ----------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        for eviction in self._evictions:
            drops = list(eviction.evict(list(self._groups), self._moment()))
            emptied = self._groups.remove([drop.member for drop in drops])
            for member, reason in drops:
                self._drop([member], reason, left=emptied)

    def _drop(self, members: Sequence[GroupMember], reason: str, left: Iterable[int] = ()) -> None:
        runs = list(runs_of(members))
        self._measures.drop(runs, reason)
        self._settle(runs, "dropped", reason, ages(runs, self._newest), left=left)

    # -- what leaves --------------------------------------------------------------------------------------------------

    def _make_batches(self) -> list[Output]:
        """As many as leave together; whether there are more is known then, and the next fold makes them."""
        outputs: list[Output] = []
        wanted = self._config.global_batch
        for _ in range(BATCHES_A_FOLD):
            ready = self._groups.ready
            order = self._sampler.order(ready, self._moment()) if self._turns is None else self._turns.order(ready)
            taken = self._groups.take(wanted, order)
            self._more = taken is not None
            if taken is None:
                break
            outputs += self._make_batch([member for group in taken for member in group.members], self._newest)
        return outputs

    def _offer(self) -> list[Output]:
        """What several shards have in the place of `_make_batches`: up to a batch is set aside, and offered."""
        offered: list[Group] = []
        lacking = self._config.global_batch - self._groups.set_aside
        if lacking > 0 and self._groups.ready:
            offered = self._groups.offer(lacking, self._sampler.order(self._groups.ready, self._moment()))
        return list(self._sharing.offer(offered, self._newest, self._now()))

    def _answer_calls(self) -> list[Output]:
        """This shard's part of each batch that is called: all that was set aside is here again, if it ever was."""
        for number in self._sharing.offered & self._groups.open.keys():
            self._endings.leave(number)  # it was offered as it was: who comes now is late
            self._groups.keep(self._groups.close(number, self._batch))
        outputs: list[Output] = []
        for called in self._sharing.calls(lambda: self._batch):
            if called.batch is None:
                if called.newest is not None and called.newest.number <= self._batch:  # there can be no later one
                    self._newest = max(filter(None, (self._newest, called.newest)))
                self._groups.take_back(called.groups)
                continue
            groups = self._groups.call(called.groups)
            if len(groups) < len(called.groups):
                log.error("batch %d lacks groups that are called: nobody offered them, or they left", self._batch)
            outputs += self._make_batch([member for group in groups for member in group.members], called.newest)
        refused, self._sharing.refused = self._sharing.refused, []
        return outputs + [dead_letter(received, "make batches", reason, self._now()) for received, reason in refused]

    def _make_batch(self, members: Sequence[GroupMember], newest: PolicyVersion | None) -> list[Output]:
        """The next batch; `newest` is the newest version announced when it was decided on."""
        runs = list(runs_of(members))
        staleness = ages(runs, newest)
        ranks = pack(self._batch, members, staleness, self._config.micro_batch_tokens, self._ranks)
        sharing = self._sharing
        outputs = [
            Output(BATCHES, str(self._batch), part, parts_of_rank(rank, sharing.shards)[sharing.shard])
            for rank, parts in enumerate(ranks)
            for part in parts
        ]
        self._settle(runs, "batched", "", staleness, self._batch)
        over_age = float((staleness > self._config.max_staleness).sum())
        others = {**self._curricula.values(), **by_task(runs), "over_age": over_age}
        if sharing.shards > 1:
            others["shard"] = float(sharing.shard)
        metric = self._measures.metric(self._batch, runs, staleness, self._groups, others, self._now())
        self._batch += 1
        return [*outputs, Output(METRICS, "experience", metric)]

    def _ask(self) -> list[Output]:
        """For harder or easier questions, as the sampler wishes; of several shards the first asks, and all tell."""
        sharing, now = self._sharing, self._now()
        told = self._curricula.tell(sharing.shard, now) if sharing.shards > 1 else ()
        outputs = [Output(BATCH_ASSEMBLY, SUCCESS, each) for each in told]
        if sharing.shard:
            return outputs
        wishes = [(each, self._sampler.wish(self._moment(each))) for each in self._curricula]
        asked = [each.ask(wish, self._batch, now) for each, wish in wishes]
        return outputs + [Output(CURRICULUM, LEVEL_REQUEST, each) for each in asked if each is not None]

    def _settle(
        self,
        runs: Sequence[RowRun],
        outcome: Outcome,
        reason: str,
        staleness: np.ndarray | None = None,
        batch: int | None = None,
        left: Iterable[int] = (),
    ) -> None:
        self._endings.end(runs, outcome, reason, batch, staleness, left)
        self._measures.end(runs, outcome)
        if outcome != "failed":
            self._curricula.count(runs)
        for shelf, first, last in runs:
            self._pending.remove(PartitionKey(EXPERIENCES.noun, shelf.partition), shelf.offset, last - first)

    def _moment(self, of: Curriculum | None = None) -> BatchContext:
        config, held = self._config, self._groups.held
        fixed = config.global_batch, self._ranks, config.seed
        success = {task: each for one in self._curricula if of in (None, one) for task, each in one.known().items()}
        level = 0 if of is None else of.level
        return BatchContext(self._batch, *fixed, self._newest, self._clock(), held, level, success)
