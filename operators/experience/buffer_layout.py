"""Which part of the buffer and of each global batch belongs to which of its shards.

A batch has a part for each division of the buffer, in partitions of its own. The number of divisions is fixed for a
run, since a trainer needs it to read any batch; the number of shards may change, up to that of the divisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.topics import partition_of


@dataclass(frozen=True)
class BufferLayout:
    """The layout of shard `shard` of `shards`, in a buffer of `divisions` over `partitions` of its input.

    Partition p is of division p mod `divisions`, division d of shard d mod `shards`.
    """

    partitions: int
    divisions: int = 1
    shards: int = 1
    shard: int = 0

    @property
    def own_divisions(self) -> tuple[int, ...]:
        """The divisions of this shard."""
        return tuple(range(self.divisions))[self.shard :: self.shards]

    @property
    def own_partitions(self) -> tuple[int, ...]:
        """The partitions of this shard."""
        return tuple(p for p in range(self.partitions) if p % self.divisions % self.shards == self.shard)

    def division_of(self, group: int) -> int:
        """The division of group number `group`; imported groups have negative numbers."""
        return partition_of(group if group >= 0 else ~group, self.partitions) % self.divisions

    def owns(self, group: int) -> bool:
        """Whether group number `group` is this shard's."""
        return self.division_of(group) % self.shards == self.shard
