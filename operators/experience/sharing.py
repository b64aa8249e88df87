"""How several shards of the buffer make one dense line of batches.

Each shard offers groups that it has ready and sets them aside, a batch's worth at most, so that work all of which is in
one shard still makes a batch. The first shard calls them up, in the order in which the log has them, batch after batch.
Each shard writes its part of every batch that is called, and settles it, in a transaction of its own. What has been
offered is trained unless the call is to take it back; all that is known of offers and calls is in the log and in the
notes of commits.
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


def quotas(sizes: Iterable[int], wanted: int) -> list[int]:
    """How many of the groups on offer, of `sizes` trajectories in their order, each next batch takes.

    A batch takes whole groups until it has `wanted` trajectories; what makes up none waits.
    """
    taken, groups, trajectories = [], 0, 0
    for size in sizes:
        groups, trajectories = groups + 1, trajectories + size
        if trajectories >= wanted:
            taken.append(groups)
            groups = trajectories = 0
    return taken


class _Offer(NamedTuple):
    offset: int
    row: int
    group: int
    size: int
    newest: PolicyVersion | None


class BatchSelector:
    """What the first shard does for all: it calls up what is offered, each offer once, in the order of the log.

    Where it `takes_back`, what was offered before the newest weight version was known goes back, so that its shard may
    drop what is too old by now. `state` are those of the last commit: the next batch, and the place of the first offer
    that is not called.
    """

    def __init__(self, wanted: int, takes_back: bool, pending: PendingOffsets, state: Sequence[int] | None) -> None:
        self._wanted, self._takes_back, self._pending = wanted, takes_back, pending
        self._batch, *place = state or (0, 0, 0)
        self._next = tuple(place)
        self._offers: deque[_Offer] = deque()

    def learn(self, place: PartitionKey, offset: int, record: BatchProposal) -> None:
        """Groups are offered; those that have been called already are passed over."""
        groups = enumerate(zip(record.groups, record.sizes, strict=True))
        offers = [_Offer(offset, row, *each, record.newest) for row, each in groups]
        fresh = [offer for offer in offers if (offset, offer.row) >= self._next]
        if fresh:
            self._offers.extend(fresh)
            self._pending.add(place, offset, len(fresh))

    def call(self, newest: PolicyVersion | None, now: int) -> Iterator[BatchSelection]:
        """Call up what makes batches."""
        if self._takes_back and any(_is_before(offer.newest, newest) for offer in self._offers):
            yield BatchSelection(None, self._take(len(self._offers)), newest, now)
        for count in quotas([offer.size for offer in self._offers], self._wanted):
            yield BatchSelection(self._batch, self._take(count), newest, now)
            self._batch += 1

    def state(self) -> list[int]:
        """What a commit's note says of it."""
        return [self._batch, *self._next]

    def _take(self, count: int) -> tuple[int, ...]:
        taken = [self._offers.popleft() for _ in range(count)]
        for offer in taken:
            self._pending.remove(_PLACE, offer.offset)
        self._next = (taken[-1].offset, taken[-1].row + 1)
        return tuple(offer.group for offer in taken)


_PLACE = PartitionKey(BATCH_ASSEMBLY.noun, 0)


def _is_before(known: PolicyVersion | None, newest: PolicyVersion | None) -> bool:
    return newest is not None and (known is None or known < newest)


class Sharing:
    """The part in it of `shard` of `shards`, of a buffer of `partitions`; the only one has no part in anything."""

    def __init__(
        self, shard: int, shards: int, partitions: int, wanted: int, takes_back: bool, state: Mapping[str, Any]
    ) -> None:
        self.shards, self.shard = shards, shard
        self._partitions = partitions
        self._pending = PendingOffsets()
        self._heard, offered, called = state.get("sharing", (0, (), None))
        self.offered: set[int] = set(offered)
        """The numbers of the groups that are set aside, or were by a start before this one."""
        self._calls: deque[tuple[int, BatchSelection]] = deque()
        self.refused: list[tuple[ReceivedRecord, str]] = []
        """Calls that are not of the first shard, and why, since this list was emptied."""
        self._caller = BatchSelector(wanted, takes_back, self._pending, called) if shard == 0 else None

    def learn(self, received: ReceivedRecord) -> None:
        """Take note of an offer or a call; the only shard has no part in any."""
        record, offset = received.record, received.offset
        if self.shards == 1:
            return
        if isinstance(record, BatchProposal):
            if self._caller is not None:
                self._caller.learn(_PLACE, offset, record)
        elif offset >= self._heard:
            self._pending.add(_PLACE, offset)
            self._calls.append((offset, record))

    def calls(self, batch: Callable[[], int]) -> Iterator[BatchSelection]:
        """The calls that have come, with the groups of this shard alone; each is answered once it is taken.

        Each that names a batch makes the next one, whose number `batch` gives: all shards read the same calls in the
        same order. A number beyond that is not of the first shard, and is refused.
        """
        while self._calls:
            offset, called = self._calls.popleft()
            self._pending.remove(_PLACE, offset)
            self._heard = offset + 1
            if called.batch is not None and called.batch > (due := batch()):
                reason = f"batch {called.batch} is called, and the next one is {due}"
                self.refused.append((ReceivedRecord(*_PLACE, offset, called), reason))
                continue
            mine = tuple(number for number in called.groups if self._is_mine(number))
            self.offered.difference_update(mine)
            yield BatchSelection(called.batch, mine, called.newest, called.selected_at)

    def offer(self, groups: Sequence[Group], newest: PolicyVersion | None, now: int) -> Iterator[Output]:
        """Offer `groups`; and where this is the first shard, call up what is on offer."""
        if groups:
            numbers = tuple(group.number for group in groups)
            self.offered.update(numbers)
            sizes = tuple(len(group.members) for group in groups)
            yield Output(BATCH_ASSEMBLY, PROPOSAL, BatchProposal(self.shard, numbers, sizes, newest, now))
        if self._caller is not None:
            for called in self._caller.call(newest, now):
                yield Output(BATCH_ASSEMBLY, SELECTION, called)

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """The offset in the offers below which nothing is pending."""
        return self._pending.low_water({_PLACE: positions[_PLACE]}) if _PLACE in positions else {}

    def state(self) -> Mapping[str, Any]:
        """What a commit's note says of it."""
        if self.shards == 1:
            return {}
        return {"sharing": [self._heard, sorted(self.offered), self._caller and self._caller.state()]}

    def _is_mine(self, number: int) -> bool:
        prompt = number if number >= 0 else ~number
        return partition_of(prompt, self._partitions) % self.shards == self.shard
