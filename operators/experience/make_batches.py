"""MakeBatches: the streaming experience buffer. It turns experiences into global batches and settles trajectories."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra.clocks import wall_ms
from infra.kafka.note import uncommitted_consumer
from infra.kafka.role_notes import NO_NOTES, ReadNotes, notes_reader
from infra.runners.step_metrics import phase
from operators.experience.batch_context import BatchContext
from operators.experience.buffer_layout import BufferLayout
from operators.experience.buffer_metrics import BufferMetrics, by_component, by_task
from operators.experience.config import ExperienceConfig
from operators.experience.curriculum import Curricula, Curriculum
from operators.experience.group_clock import GroupClock
from operators.experience.groups import Group, Groups
from operators.experience.members import ExperienceBlock, GroupMember, RowRun, runs_of, staleness_of
from operators.experience.pack_batches import SelectedBatch, divide
from operators.experience.settlements import PromptOrder, SettlementLedger
from operators.experience.shard_coordination import ShardCoordinator
from operators.experience.trainable import ANY_TOKEN, Untrainable, untrainable
from operators.io.awaiting_notes import AwaitingNotes
from operators.io.config import ShardConfig
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.pending import PendingOffsets
from schemas.metric_labels import LATER_PARTS, SHARD, SHARDS
from schemas.records import (
    BatchProposal,
    BatchSelection,
    LevelReply,
    LevelRequest,
    LevelSuccess,
    Outcome,
    Pause,
    PolicyVersion,
    WeightVersion,
)
from schemas.topics import BATCH_ASSEMBLY, CURRICULUM, EXPERIENCES, LEVEL_REQUEST, METRICS, SETTLED, SUCCESS

log = logging.getLogger(__name__)

MAX_BATCHES_PER_FOLD = 4
"""Batches written in one transaction, at most; further ready batches are packed while these are sent."""


@dataclass(frozen=True)
class MakeBatches:
    """A global batch is one transaction: its micro-batches, a Settled row for each member, and the low-water mark.

    A batch has at least `global_batch` trajectories, all trainable. An untrainable trajectory is settled when it
    arrives (and is a dead letter if it is malformed), and its group completes without it. If failures leave only one
    member of a group, it is dropped. Staleness is measured here, at consumption: newest announced version minus the
    version that generated.

    `partitions` is the partition count of the topics keyed by group; each of `config.shards` has its own share of them
    (see `buffer_layout` and `shard_coordination`). `shares` is the trainer's number of shares of a batch; `levels` the
    number of curriculum levels by task; `vocabulary` the model's in tokens (None: only the trainer detects unknown
    tokens, at the cost of a batch); `rewards_failures` says by task whether failed trajectories have a reward to train
    (see `untrainable`). `shard` is the configuration of any of the shards; a curriculum needs it.
    """

    config: ExperienceConfig
    partitions: int
    shares: int = 1
    levels: Mapping[str, int] = field(default_factory=dict)
    vocabulary: int | None = None
    rewards_failures: Mapping[str, bool] = field(default_factory=dict)
    shard: ShardConfig | None = None

    def restore(
        self,
        restored: Restored,
        now: Callable[[], int] = wall_ms,
        clock: Callable[[], float] = time.monotonic,
        notes: ReadNotes | None = None,
    ) -> _Buffering:
        """The state at a start: from the commit note and the Settled records read back."""
        layout = BufferLayout(self.partitions, self.config.divisions, self.config.shards, restored.shard)
        settlements = SettlementLedger.restored(restored, layout)
        window = self.config.make_sampler().success_window
        curricula = Curricula(self.levels, restored.state.get("curriculum"), window)
        metrics = BufferMetrics(restored.group)
        if notes is None:
            notes = NO_NOTES if self.shard is None else _notes_of(self.shard)
        return _Buffering(self, layout, settlements, curricula, restored.state, metrics, now, clock, notes)


def _notes_of(shard: ShardConfig) -> ReadNotes:
    return notes_reader(shard.run, lambda: uncommitted_consumer(shard.client), undecided=True)


class _Buffering(ShardFold):
    """The state of one start. Held trajectories are in the log above the low-water mark, settled ones in the ledger."""

    def __init__(
        self,
        step: MakeBatches,
        layout: BufferLayout,
        settlements: SettlementLedger,
        curricula: Curricula,
        state: Mapping[str, Any],
        metrics: BufferMetrics,
        now: Callable[[], int] = wall_ms,
        clock: Callable[[], float] = time.monotonic,
        notes: ReadNotes = NO_NOTES,
    ) -> None:
        self._config, self._shares, self._layout = step.config, step.shares, layout
        self._vocabulary, self._rewards_failures = step.vocabulary or ANY_TOKEN, step.rewards_failures
        self._writers = step.config.make_writers()
        self._sampler = step.config.make_sampler()
        self._prompt_order = PromptOrder(settlements) if step.config.over_age == "wait" else None
        self._evictions = step.config.make_evictions()
        self._settlements, self._curricula = settlements, curricula
        self._now, self._clock = now, GroupClock(clock)
        self._batch = state.get("batch", 0)
        self._coordinator = ShardCoordinator(layout, step.config.global_batch, bool(self._evictions), state)
        self._groups = Groups()
        self._pending = PendingOffsets()
        self._level_replies = AwaitingNotes(notes, "prompts", self._pending)
        newest = state.get("newest")
        self._newest = PolicyVersion.parse(newest) if newest else None
        self._metrics = metrics
        self._dead_letters: list[Output] = []
        self._more = False

    def fold(self, polled: Polled) -> list[Output | SelectedBatch]:
        self._settlements.begin_emission()
        with phase("admit experiences"):
            self._begin_levels(polled.records)
            for received in polled.records:
                self._handle(received)
        outputs: list[Output | SelectedBatch] = []
        if polled.caught_up:
            with phase("evict"):
                self._expire_groups()
                outputs += self._handle_selections()
                if polled.records:
                    self._evict()
            with phase("sample batches"):
                outputs += self._make_batches() if self._coordinator.alone else self._propose()
                outputs += self._curriculum_outputs()
                outputs += self._unfilled_metric()
        dead_letters, self._dead_letters = self._dead_letters, []
        settled = self._settlements.settled_records(self._now())
        return [*dead_letters, *outputs, *([Output(SETTLED, "", settled)] if settled is not None else [])]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(
            low_water=self._pending.low_water(positions) | self._coordinator.low_water(positions),
            ledger_from=self._settlements.oldest_emission(),
            state={
                "settled": self._settlements.state(),
                "batch": self._batch,
                "newest": None if self._newest is None else str(self._newest),
                **self._curricula.state(),
                **self._coordinator.state(),
            },
        )

    def busy(self) -> bool:
        return self._more

    def _handle(self, received: ReceivedRecord) -> None:
        match received.record:
            case WeightVersion() as manifest:
                self._newest = max(filter(None, (self._newest, manifest.version)))
            case Pause() as pause:
                (self._clock.stop if pause.paused else self._clock.go)()
            case LevelReply() | LevelRequest():
                pass  # see `_begin_levels`
            case BatchProposal() | BatchSelection():
                self._coordinator.handle(received)
            case LevelSuccess() as success:
                if success.shard < self._layout.shards:  # else of a shard that no longer exists
                    self._curricula.handle_success(success, self._layout.shard)
            case _:
                self._add(received)

    def _begin_levels(self, records: Iterable[ReceivedRecord]) -> None:
        """Change to the levels of the replies among `records`, unless they are of another program."""
        name = CURRICULUM.short_name
        replies, prompts = self._level_replies.take(each for each in records if each.topic == name)
        for received in replies:
            if (reason := self._curricula.handle_reply(received.record, prompts)) is not None:
                self._dead_letters.append(dead_letter(received, "make batches", reason, self._now()))

    # -- entering the buffer ------------------------------------------------------------------------------------------

    def _add(self, received: ReceivedRecord) -> None:
        partition = PartitionKey(received.topic, received.partition)
        block = ExperienceBlock(received.record, received.partition, received.offset)
        now = self._clock()
        bad_rows = untrainable(block, self._vocabulary, self._rewards_failures)
        accept_all = not bad_rows and not self._writers and self._prompt_order is None
        for number, run in RowRun(block, 0, len(block)).by_group():
            fresh = self._settlements.register(number, block.members[run.first : run.last])  # without duplicates
            if not fresh:
                continue
            self._pending.add(partition, received.offset, len(fresh))
            self._metrics.count_arrived(len(fresh))
            members = [GroupMember(block, run.first + position) for position in fresh]
            if not accept_all or self._settlements.has_left(number):
                members = [member for member in members if self._accept(member, bad_rows)]
            if members:
                self._groups.add(number, members, now)
            settled = self._settlements.settled_members(number)
            group = self._groups.complete(number, block.sizes[run.first], settled, self._batch)
            if group is not None:
                self._add_closed(group)

    def _accept(self, member: GroupMember, bad_rows: Mapping[int, Untrainable]) -> bool:
        """Whether `member` enters the buffer; if not, settle it. `bad_rows` are the untrainable rows of its block."""
        if self._settlements.has_left(member.number):
            self._drop([member], "late: its group had left the buffer")
        elif (bad := bad_rows.get(member.row)) is not None:
            self._settle(list(runs_of([member])), "failed", bad.reason)
            if bad.malformed:
                self._dead_letters.append(self._dead_letter(member, bad.reason))
        elif self._prompt_order is not None and member.number < 0:
            self._drop([member], "imported: over_age = wait trains only prompts of this run, in their order")
        elif refusal := next(filter(None, (writer.refuse(member) for writer in self._writers)), None):
            self._drop([member], refusal)
        else:
            return True
        return False

    def _dead_letter(self, member: GroupMember, reason: str) -> Output:
        block = member.block
        received = ReceivedRecord(EXPERIENCES.short_name, block.partition, block.offset, member.experience())
        return dead_letter(received, "make batches", f"{member.trajectory_id}: {reason}", self._now())

    def _add_closed(self, group: Group) -> None:
        """Make a closed group ready, unless the sampler refuses it or an earlier start has proposed it."""
        if group.number in self._coordinator.proposed:
            self._groups.add_proposed(group)
            return
        reason = self._sampler.refuse(group)
        alone = len(group.members) == 1 and len(set(group.members[0].conversation_rewards)) < 2
        if alone and self._settlements.has_failed(group.number):
            reason = f"one of {group.expected} members is left after failures: there is nothing to compare it with"
        if reason is None:
            self._groups.make_ready(group)
        else:
            self._drop(group.members, reason, left={group.number})

    def _expire_groups(self) -> None:
        """Close the groups that have waited longer than `group_timeout_s` for their members."""
        if not self._config.group_timeout_s:
            return
        due = self._clock() - self._config.group_timeout_s
        expired = [number for number, group in self._groups.open.items() if group.seen_at <= due]
        for number in expired:
            group = self._groups.close(number, self._batch)
            self._settlements.mark_left(number)
            if self._config.partial_groups == "train":
                self._add_closed(group)
            else:
                arrived = f"{len(group.members)} of {group.expected} members arrived"
                self._drop(group.members, f"{arrived} in {self._config.group_timeout_s:g} s", left={number})

    # -- dropping -----------------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        for eviction in self._evictions:
            drops = list(eviction.evict(list(self._groups), self._context()))
            emptied = self._groups.remove([drop.member for drop in drops])
            for member, reason in drops:
                self._drop([member], reason, left=emptied)

    def _drop(self, members: Sequence[GroupMember], reason: str, left: Iterable[int] = ()) -> None:
        runs = list(runs_of(members))
        self._metrics.count_dropped(runs, reason)
        self._settle(runs, "dropped", reason, staleness_of(runs, self._newest), left=left)

    # -- leaving the buffer -------------------------------------------------------------------------------------------

    def _make_batches(self) -> list[Output | SelectedBatch]:
        """Up to MAX_BATCHES_PER_FOLD batches; if more are ready, the next fold makes them."""
        outputs: list[Output | SelectedBatch] = []
        by_prompt = self._prompt_order
        for _ in range(MAX_BATCHES_PER_FOLD):
            ready = self._groups.ready
            order = self._sampler.order(ready, self._context()) if by_prompt is None else by_prompt.order(ready)
            taken = self._groups.take(self._config.global_batch, order)
            self._more = taken is not None
            if taken is None:
                break
            outputs += self._make_batch(self._batch, taken, self._newest)
        return outputs

    def _propose(self) -> list[Output]:
        """With several divisions, instead of `_make_batches`: propose groups, until a batch's worth is proposed."""
        proposed: list[Group] = []
        missing = self._config.global_batch - self._groups.proposed_members
        if missing > 0 and self._groups.ready:
            proposed = self._groups.propose(missing, self._sampler.order(self._groups.ready, self._context()))
        return list(self._coordinator.propose(proposed, self._newest, self._now()))

    def _handle_selections(self) -> list[Output | SelectedBatch]:
        """This shard's parts of each selected batch. It has read its input again, so all proposed groups are here."""
        for number in self._coordinator.proposed & self._groups.open.keys():
            self._settlements.mark_left(number)  # proposed with the members it had: further ones are late
            self._groups.add_proposed(self._groups.close(number, self._batch))
        outputs: list[Output | SelectedBatch] = []
        for batch, selected, divisions, newest in self._coordinator.selections():
            groups = self._groups.take_proposed(selected)
            if batch is None:
                if newest is not None and newest.number <= self._batch:  # a higher version number cannot exist
                    self._newest = max(filter(None, (self._newest, newest)))
                for group in groups:
                    self._groups.make_ready(group)
                continue
            if len(groups) < len(selected):
                log.error("batch %d lacks selected groups: this shard does not hold them", batch)
            outputs += self._make_batch(batch, groups, newest, divisions)
        refused, self._coordinator.refused = self._coordinator.refused, []
        return outputs + [dead_letter(received, "make batches", reason, self._now()) for received, reason in refused]

    def _make_batch(
        self, number: int, groups: Sequence[Group], newest: PolicyVersion | None, divisions: Sequence[int] = (0,)
    ) -> list[Output | SelectedBatch]:
        """The parts of `divisions` of batch `number`, which are `groups`; `newest` is the newest version announced when
        the batch was decided."""
        members = [member for group in groups for member in group.members]
        runs = list(runs_of(members))
        staleness = staleness_of(runs, newest)
        selected = divide(SelectedBatch(number, tuple(members), staleness), divisions, self._layout)
        self._settle(runs, "batched", "", staleness, number)
        over_age = float((staleness > self._config.max_staleness).sum())
        # Parts that are later than the others of this shard do not replace the metric of those.
        later = {} if len(divisions) == len(self._layout.own_divisions) else {LATER_PARTS: float(divisions[0])}
        others = {**self._metric_values(), **later, **by_task(runs), **by_component(runs), "over_age": over_age}
        metric = self._metrics.metric(number, runs, staleness, self._groups, others, self._now())
        self._batch = max(self._batch, number + 1)
        return [*selected, Output(METRICS, "experience", metric)]

    def _metric_values(self) -> dict[str, float]:
        """Values of every metric, with a batch or without."""
        layout = self._layout
        shard = {} if layout.divisions == 1 else {SHARD: float(layout.shard), SHARDS: float(layout.shards)}
        return {**self._curricula.values(), **shard}

    def _unfilled_metric(self) -> list[Output]:
        """A metric if no batch can be filled, though trajectories arrive."""
        alone = self._coordinator.alone and self._prompt_order is None and not self._more  # else groups may wait
        left_out = sum(len(group.members) for group in self._groups.ready) if alone else 0
        held, batch, values = self._groups, self._config.global_batch, self._metric_values()
        metric = self._metrics.unfilled_metric(self._batch, batch, held, left_out, values, self._now())
        return [] if metric is None else [Output(METRICS, "experience", metric)]

    def _curriculum_outputs(self) -> list[Output]:
        """Success reports, if there are several shards; from the first shard also the sampler's level requests."""
        shard, now = self._layout.shard, self._now()
        reports = self._curricula.reports(shard, now) if self._layout.shards > 1 else ()
        outputs = [Output(BATCH_ASSEMBLY, SUCCESS, report) for report in reports]
        if shard:
            return outputs
        changes = [(each, self._sampler.level_request(self._context(each))) for each in self._curricula]
        requests = [curriculum.request(change, self._batch, now) for curriculum, change in changes]
        return outputs + [Output(CURRICULUM, LEVEL_REQUEST, each) for each in requests if each is not None]

    def _settle(
        self,
        runs: Sequence[RowRun],
        outcome: Outcome,
        reason: str,
        staleness: np.ndarray | None = None,
        batch: int | None = None,
        left: Iterable[int] = (),
    ) -> None:
        self._settlements.settle(runs, outcome, reason, batch, staleness, left)
        self._metrics.count_settled(runs, outcome)
        if outcome != "failed":
            self._curricula.count(runs)
        for block, first, last in runs:
            self._pending.remove(PartitionKey(EXPERIENCES.short_name, block.partition), block.offset, last - first)

    def _context(self, only: Curriculum | None = None) -> BatchContext:
        """The present context; with `only`, the success of that curriculum alone."""
        config, held = self._config, self._groups.held
        fixed = config.global_batch, self._shares, config.seed
        chosen = [each for each in self._curricula if only in (None, each)]
        success = {task: counts for each in chosen for task, counts in each.all_shards().items()}
        level = 0 if only is None else only.level
        return BatchContext(self._batch, *fixed, self._newest, self._clock(), held, level, success)
