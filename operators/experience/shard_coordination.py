"""Coordination of the buffer's shards, which together assemble one dense sequence of batches.

Each shard proposes groups that are ready, one batch's worth at most, so that a batch can be made even if all its groups
are in one shard. The first shard selects the proposed groups for batch after batch, in the order of the log. Each shard
writes and settles the parts that its divisions have of every selected batch, in a transaction of its own. A proposed
group is trained unless a selection returns it to its shard. The state of proposals and selections is in the log and in
the commit notes alone, so the divisions of a shard can go to another one, see `resharded_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from operators.experience.buffer_layout import BufferLayout
from operators.experience.groups import Group
from operators.io.elements import Output, PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets
from schemas.records import BatchProposal, BatchSelection, PolicyVersion
from schemas.topics import BATCH_ASSEMBLY, PROPOSAL, SELECTION


def groups_per_batch(sizes: Iterable[int], wanted: int) -> list[int]:
    """How many of the proposed groups each next batch takes; `sizes` are their trajectories, in order.

    A batch takes whole groups until it has `wanted` trajectories; the rest, too few for a batch, waits.
    """
    taken, groups, trajectories = [], 0, 0
    for size in sizes:
        groups, trajectories = groups + 1, trajectories + size
        if trajectories >= wanted:
            taken.append(groups)
            groups = trajectories = 0
    return taken


class _ProposedGroup(NamedTuple):
    offset: int
    row: int
    group: int
    size: int
    newest: PolicyVersion | None


class BatchSelector:
    """The first shard's part: it selects the proposed groups, each once, in the order of the log.

    With `returns_stale` the groups proposed before the newest weight version was known return to their shards, which
    may drop what has become too stale. `state` is the state in the last commit note: the number of the next batch, and
    the offset and row of the first proposed group that is not selected.
    """

    def __init__(self, wanted: int, returns_stale: bool, pending: PendingOffsets, state: Sequence[int] | None) -> None:
        self._wanted, self._returns_stale, self._pending = wanted, returns_stale, pending
        self._batch, *position = state or (0, 0, 0)
        self._next = tuple(position)
        self._proposed: deque[_ProposedGroup] = deque()

    def handle(self, partition: PartitionKey, offset: int, record: BatchProposal) -> None:
        """Record the proposed groups; those that have been selected already are ignored."""
        groups = enumerate(zip(record.groups, record.sizes, strict=True))
        proposed = [_ProposedGroup(offset, row, *each, record.newest_version) for row, each in groups]
        fresh = [each for each in proposed if (offset, each.row) >= self._next]
        if fresh:
            self._proposed.extend(fresh)
            self._pending.add(partition, offset, len(fresh))

    def select(self, newest: PolicyVersion | None, now: int) -> Iterator[BatchSelection]:
        """Select groups for as many batches as the proposed groups fill."""
        known = (each.newest for each in self._proposed)
        if self._returns_stale and newest is not None and any(each is None or each < newest for each in known):
            yield BatchSelection(None, self._take(len(self._proposed)), newest, now)
        for count in groups_per_batch([each.size for each in self._proposed], self._wanted):
            yield BatchSelection(self._batch, self._take(count), newest, now)
            self._batch += 1

    def state(self) -> list[int]:
        """The state that the commit note holds."""
        return [self._batch, *self._next]

    def _take(self, count: int) -> tuple[int, ...]:
        taken = [self._proposed.popleft() for _ in range(count)]
        for each in taken:
            self._pending.remove(_PARTITION, each.offset)
        self._next = (taken[-1].offset, taken[-1].row + 1)
        return tuple(each.group for each in taken)


_PARTITION = PartitionKey(BATCH_ASSEMBLY.short_name, 0)


class DivisionProgress(NamedTuple):
    """How far a division has come: the offset of the first selection that it has not handled, and its next batch.

    The divisions of one shard are equally far, but for a while after they came from different shards.
    """

    next_offset: int = 0
    next_batch: int = 0

    @classmethod
    def of_state(cls, state: Mapping[str, Any], divisions: Iterable[int]) -> dict[int, DivisionProgress]:
        """The progress of `divisions`, which are those of one shard, by the state in its commit note."""
        same = cls(state.get("proposals", (0,))[0], state.get("batch", 0))
        apart = {int(division): cls(*each) for division, each in state.get("progress", {}).items()}
        return {division: apart.get(division, same) for division in divisions}

    @staticmethod
    def to_state(progress: Mapping[int, DivisionProgress]) -> Mapping[str, Any]:
        """The part of a commit note that `of_state` needs in addition to what every note of a shard has."""
        if len(set(progress.values())) == 1:
            return {}
        return {"progress": {str(division): list(each) for division, each in progress.items()}}


class BatchParts(NamedTuple):
    """What a selection means for `divisions` of a shard: `groups` of theirs are in `batch`, or return if it is None."""

    batch: int | None
    groups: tuple[int, ...]
    divisions: tuple[int, ...]
    newest: PolicyVersion | None


class ShardCoordinator:
    """Coordinates a shard with the others; it does nothing in a buffer of one division."""

    def __init__(self, layout: BufferLayout, wanted: int, returns_stale: bool, state: Mapping[str, Any]) -> None:
        self._layout = layout
        self.alone = layout.divisions == 1
        """Whether this shard makes batches by itself."""
        self._pending = PendingOffsets()
        _, proposed, selected = state.get("proposals", (0, (), None))
        self._progress = DivisionProgress.of_state(state, layout.own_divisions)
        self.proposed: set[int] = set(proposed)
        """The numbers of the groups that this start, or a start before it, has proposed and nobody has selected."""
        self._selections: deque[tuple[int, BatchSelection]] = deque()
        self.refused: list[tuple[ReceivedRecord, str]] = []
        """Selections that the first shard cannot have written, with the reason; the caller empties this list."""
        self._selector = BatchSelector(wanted, returns_stale, self._pending, selected) if layout.shard == 0 else None

    def handle(self, received: ReceivedRecord) -> None:
        """Record a proposal or a selection; a single division ignores both."""
        record, offset = received.record, received.offset
        if self.alone:
            return
        if isinstance(record, BatchProposal):
            if self._selector is not None:
                self._selector.handle(_PARTITION, offset, record)
        elif self._waiting(offset):
            self._pending.add(_PARTITION, offset)
            self._selections.append((offset, record))

    def selections(self) -> Iterator[BatchParts]:
        """What the selections received mean for this shard; each counts as handled once it is yielded.

        All divisions handle the same selections in the same order, so a selection with a batch number makes the next
        batch of each. A higher number cannot be the first shard's, and the selection is refused.
        """
        while self._selections:
            offset, selection = self._selections.popleft()
            self._pending.remove(_PARTITION, offset)
            divisions = self._waiting(offset)
            due = self._progress[divisions[0]].next_batch
            refused = selection.batch is not None and selection.batch > due
            made = selection.batch is not None and not refused
            self._progress |= dict.fromkeys(divisions, DivisionProgress(offset + 1, due + made))
            if refused:
                reason = f"batch {selection.batch} is selected, but the next batch is {due}"
                self.refused.append((ReceivedRecord(*_PARTITION, offset, selection), reason))
                continue
            own = tuple(number for number in selection.groups if self._layout.division_of(number) in divisions)
            self.proposed.difference_update(own)
            yield BatchParts(due if made else None, own, divisions, selection.newest_version)

    def propose(self, groups: Sequence[Group], newest: PolicyVersion | None, now: int) -> Iterator[Output]:
        """Propose `groups`; the first shard also selects from what has been proposed."""
        if groups:
            numbers = tuple(group.number for group in groups)
            self.proposed.update(numbers)
            sizes = tuple(len(group.members) for group in groups)
            yield Output(BATCH_ASSEMBLY, PROPOSAL, BatchProposal(self._layout.shard, numbers, sizes, newest, now))
        if self._selector is not None:
            for selection in self._selector.select(newest, now):
                yield Output(BATCH_ASSEMBLY, SELECTION, selection)

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """The offset in topic `batch-assembly` below which no proposal or selection is pending."""
        return self._pending.low_water({_PARTITION: positions[_PARTITION]}) if _PARTITION in positions else {}

    def state(self) -> Mapping[str, Any]:
        """The state that the commit note holds."""
        if self.alone:
            return {}
        first = min(self._progress.values()).next_offset
        proposals = [first, sorted(self.proposed), self._selector and self._selector.state()]
        return {"proposals": proposals, **DivisionProgress.to_state(self._progress)}

    def _waiting(self, offset: int) -> tuple[int, ...]:
        """The divisions that have not handled the selection at `offset`: all of them are equally far."""
        return tuple(division for division, each in self._progress.items() if each.next_offset <= offset)
