"""Several shards of the experience operator on one log in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from buffer_harness import BufferInputs
from in_memory_log import Log, Shard
from record_factories import shard, topic_input

from operators.experience.config import ExperienceConfig
from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import pack_batches
from operators.io.config import TopicInput
from operators.io.elements import PartitionKey, ReceivedRecord
from operators.trainer.assembly import BatchAssembly, WholeBatch
from schemas.records import Settled
from schemas.topics import BATCH_ASSEMBLY, BATCHES, CURRICULUM, EXPERIENCES, LEVEL_REPLY, RELAY, SETTLED


def buffer_shards(log: Log, config: ExperienceConfig, partitions: int, ranks: int = 1, levels: int = 0) -> list[Shard]:
    """All shards of a buffer, not started."""
    return [
        Shard(
            log,
            shard(
                "experience",
                TopicInput(EXPERIENCES, tuple(range(partitions))[index :: config.shards], keys=("p", "i"), blocks=True),
                topic_input(RELAY),
                topic_input(CURRICULUM, keys=(LEVEL_REPLY,)),
                topic_input(BATCH_ASSEMBLY),
                ledger=("settled",),
                index=index,
            ),
            MakeBatches(config, partitions, ranks, {"": levels}).restore,
            partial(pack_batches, budget=config.micro_batch_tokens, shares=ranks, shards=config.shards),
        )
        for index in range(config.shards)
    ]


class Buffers(BufferInputs):
    """`shards` of the experience operator, over as many `partitions` and for `ranks` of the trainer."""

    def __init__(
        self,
        shards: int = 2,
        partitions: int = 4,
        ranks: int = 1,
        levels: int = 0,
        global_batch: int = 4,
        **config: Any,
    ) -> None:
        self.log = Log()
        self.partitions, self.ranks = partitions, ranks
        settings = ExperienceConfig(shards=shards, global_batch=global_batch, **config)
        self.shards = buffer_shards(self.log, settings, partitions, ranks, levels)
        for each in self.shards:
            each.start()

    def run(self, turns: int = 6) -> None:
        """Every shard polls and commits in turn: proposals, selections and parts need one turn each."""
        for _ in range(turns):
            for each in self.shards:
                each.run()

    def whole(self) -> list[WholeBatch]:
        """The complete batches, as a trainer of one rank reads them."""
        partitions = range(len(self.shards) * self.ranks)
        assembly = BatchAssembly(partitions, shards=len(self.shards))
        found: list[WholeBatch] = []
        for partition in partitions:
            received_here = self.received(partition)
            places = [(received.record.batch, received.record.index) for received in received_here]
            assert places == sorted(set(places)), "in each partition batches stand once, and in their order"
            for received in received_here:
                found += assembly.add(received.record, partition, received.offset)
        assert not assembly.rejected
        return found

    def received(self, partition: int) -> list[ReceivedRecord]:
        """The records in a partition of the batches topic."""
        place = PartitionKey(BATCHES.short_name, partition)
        return self.log.received(place, 0, self.log.end(place))

    def batches(self) -> list[tuple[str, ...]]:
        whole = self.whole()
        assert [batch.number for batch in whole] == list(range(len(whole)))
        return [tuple(name for part in batch.parts for name in part.trajectory_ids) for batch in whole]

    def outcomes(self) -> dict[str, str]:
        records: list[Settled] = self.log.rows(SETTLED)
        assert len({r.trajectory_id for r in records}) == len(records)
        return {r.trajectory_id: r.outcome for r in records}
