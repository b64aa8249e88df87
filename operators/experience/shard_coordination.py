"""Coordination of the buffer's shards, which together assemble one dense sequence of batches.

Each shard proposes groups that are ready, one batch's worth at most, so that a batch can be made even if all its groups
are in one shard. The first shard selects the proposed groups for batch after batch, in the order of the log. Each shard
writes and settles its part of every selected batch in a transaction of its own. A proposed group is trained unless a
selection returns it to its shard. The state of proposals and selections is in the log and in the commit notes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from operators.experience.groups import Group
from operators.io.elements import Output, PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets
from schemas.records import BatchProposal, BatchSelection, PolicyVersion
from schemas.topics import BATCH_ASSEMBLY, PROPOSAL, SELECTION, partition_of


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


class ShardCoordinator:
    """Coordinates `shard` of `shards` with the others, in a buffer of `partitions`; it does nothing for one shard."""

    def __init__(
        self, shard: int, shards: int, partitions: int, wanted: int, returns_stale: bool, state: Mapping[str, Any]
    ) -> None:
        self.shards, self.shard = shards, shard
        self._partitions = partitions
        self._pending = PendingOffsets()
        self._next_offset, proposed, selected = state.get("proposals", (0, (), None))
        self.proposed: set[int] = set(proposed)
        """The numbers of the groups that this start, or a start before it, has proposed and nobody has selected."""
        self._selections: deque[tuple[int, BatchSelection]] = deque()
        self.refused: list[tuple[ReceivedRecord, str]] = []
        """Selections that the first shard cannot have written, with the reason; the caller empties this list."""
        self._selector = BatchSelector(wanted, returns_stale, self._pending, selected) if shard == 0 else None

    def handle(self, received: ReceivedRecord) -> None:
        """Record a proposal or a selection; a single shard ignores both."""
        record, offset = received.record, received.offset
        if self.shards == 1:
            return
        if isinstance(record, BatchProposal):
            if self._selector is not None:
                self._selector.handle(_PARTITION, offset, record)
        elif offset >= self._next_offset:
            self._pending.add(_PARTITION, offset)
            self._selections.append((offset, record))

    def selections(self, next_batch: Callable[[], int]) -> Iterator[BatchSelection]:
        """The selections received, each with this shard's groups only; each counts as handled once it is yielded.

        All shards read the same selections in the same order, so a selection with a batch number makes the next batch,
        whose number `next_batch` returns. A higher number cannot be the first shard's, and the selection is refused.
        """
        while self._selections:
            offset, selection = self._selections.popleft()
            self._pending.remove(_PARTITION, offset)
            self._next_offset = offset + 1
            if selection.batch is not None and selection.batch > (due := next_batch()):
                reason = f"batch {selection.batch} is selected, but the next batch is {due}"
                self.refused.append((ReceivedRecord(*_PARTITION, offset, selection), reason))
                continue
            own = tuple(number for number in selection.groups if self._is_own(number))
            self.proposed.difference_update(own)
            yield BatchSelection(selection.batch, own, selection.newest_version, selection.selected_at)

    def propose(self, groups: Sequence[Group], newest: PolicyVersion | None, now: int) -> Iterator[Output]:
        """Propose `groups`; the first shard also selects from what has been proposed."""
        if groups:
            numbers = tuple(group.number for group in groups)
            self.proposed.update(numbers)
            sizes = tuple(len(group.members) for group in groups)
            yield Output(BATCH_ASSEMBLY, PROPOSAL, BatchProposal(self.shard, numbers, sizes, newest, now))
        if self._selector is not None:
            for selection in self._selector.select(newest, now):
                yield Output(BATCH_ASSEMBLY, SELECTION, selection)

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """The offset in topic `batch-assembly` below which no proposal or selection is pending."""
        return self._pending.low_water({_PARTITION: positions[_PARTITION]}) if _PARTITION in positions else {}

    def state(self) -> Mapping[str, Any]:
        """The state that the commit note holds."""
        if self.shards == 1:
            return {}
        return {"proposals": [self._next_offset, sorted(self.proposed), self._selector and self._selector.state()]}

    def _is_own(self, number: int) -> bool:
        prompt = number if number >= 0 else ~number
        return partition_of(prompt, self._partitions) % self.shards == self.shard
