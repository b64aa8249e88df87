"""Several shards of the experience operator on one log in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from buffer_harness import BufferInputs
from in_memory_log import Log, Shard
from record_factories import shard, topic_input

from operators.experience.buffer_layout import BufferLayout
from operators.experience.config import ExperienceConfig
from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import pack_batches
from operators.experience.resharded_state import split_buffer_state
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
                TopicInput(
                    EXPERIENCES,
                    BufferLayout(partitions, config.divisions, config.shards, index).own_partitions,
                    keys=("p", "i"),
                    blocks=True,
                ),
                topic_input(RELAY),
                topic_input(CURRICULUM, keys=(LEVEL_REPLY,)),
                topic_input(BATCH_ASSEMBLY),
                ledger=("settled",),
                index=index,
            ),
            partial(MakeBatches(config, partitions, ranks, {"": levels}).restore, notes=log.notes),
            partial(pack_batches, budget=config.micro_batch_tokens, shares=ranks, divisions=config.divisions),
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
        self.partitions, self.ranks, self.levels = partitions, ranks, levels
        self.settings = ExperienceConfig(shards=shards, global_batch=global_batch, **config)
        self.shards = buffer_shards(self.log, self.settings, partitions, ranks, levels)
        for each in self.shards:
            each.start()

    def run(self, turns: int = 6) -> None:
        """Every shard polls and commits in turn: proposals, selections and parts need one turn each."""
        for _ in range(turns):
            for each in self.shards:
                each.run()

    def reshard(self, shards: int) -> None:
        """Kill all shards and start as many others, as `infra.kafka.resharding` does."""
        old = [self.log.committed(each.config.group) for each in self.shards]
        states = [dict(group.state) for group in old]
        offsets, floors = _lowest(group.offsets for group in old), _lowest(group.ledger for group in old)
        for each in self.shards:
            each.crash()
        self.settings = replace(self.settings, shards=shards)
        self.shards = buffer_shards(self.log, self.settings, self.partitions, self.ranks, self.levels)
        layout = {"partitions": self.partitions, "divisions": self.settings.divisions}
        for number, each in enumerate(self.shards):
            new = self.log.committed(each.config.group)
            new.state = split_buffer_state(states, new.state, number, shards, **layout)
            new.offsets = {place: offsets[place] for place in each.places if place in offsets}
            new.ledger = dict(floors)
        for each in self.shards:
            each.start()

    def whole(self) -> list[WholeBatch]:
        """The complete batches, as a trainer of one rank reads them."""
        partitions = range(self.settings.divisions * self.ranks)
        assembly = BatchAssembly(partitions, divisions=self.settings.divisions)
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


def _lowest(offsets: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for each in offsets:
        for place, offset in each.items():
            found[place] = min(offset, found.get(place, offset))
    return found
