"""Configuration of one shard of a pipeline: its topics, its Kafka client and its time-outs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Input, Partition, ProcessHeartbeats, SessionConfig
from infra.runners.liveness import StepBudget
from operators.io.elements import PartitionKey
from operators.io.validation import NEWEST_MANIFEST
from schemas.topics import REPLICAS, RESTORE, Topic, group_name


class _OfShard(Protocol):
    config: ShardConfig

    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_OfShard)


def opened_for(config: ShardConfig, opened: dict[str, _Opened], new: Callable[[ShardConfig], _Opened]) -> _Opened:
    """The one of `opened`, by group, for `config`'s shard; a `new` one if it has another configuration."""
    found = opened.get(config.group)
    if found is None or found.config != config:
        if found is not None:
            found.close()
        found = opened[config.group] = new(config)
    return found


@dataclass(frozen=True)
class TopicInput:
    """A topic to read. With `keys`, records whose key starts with none of them are skipped without decoding.

    With `blocks` the rows of a Kafka record arrive as one `ReceivedRecord` that holds a Block. `start` and `newest`
    set the first offset (see `Input`). `earliest` is for compacted topics only: a start must not read a whole run.
    """

    topic: Topic
    partitions: tuple[int, ...] = (0,)
    start: Literal["committed", "earliest", "latest"] = "committed"
    keys: tuple[str, ...] = ()
    blocks: bool = False
    newest: int | None = None


@dataclass(frozen=True)
class ShardConfig:
    """One shard of one pipeline: its inputs, its ledger topics and its intervals.

    In seconds: `slice_s` is how long the source runs before the runner may make a checkpoint (None: the runner's
    default), `poll_s` how long an idle poll waits, `commit_s` after how long offsets that moved without outputs are
    committed, `transaction_timeout_s` how long a transaction may take. This shard alone writes the `owned`
    partitions, the records of its ledger whose keys match the pattern `ledger_keys`, and, with `heartbeats`, those of
    its replicas in the topic `replicas`: see SessionConfig.
    `start_positions` is called at every start; its positions override the committed ones (a trainer resumes from its
    checkpoint). A `bounded` shard reads what had been written when it started, and finishes once its step is idle.
    `budget` bounds one step. Every `counters_s` seconds its counters are written to the metrics of the run (None:
    never). A transaction with outputs to the `unnoted` topics alone may lack the commit note, if the last one is
    younger than `commit_s`: for a step whose start does not continue from its inputs. `shards` is the number of the
    pipeline's shards where it may change during a run (see `infra.kafka.resharding`), else 1.
    """

    client: ClientProperties
    run: str
    pipeline: str
    shard: int = 0
    inputs: tuple[TopicInput, ...] = ()
    ledger: tuple[tuple[Topic, tuple[int, ...]], ...] = ()
    owned: tuple[tuple[Topic, tuple[int, ...]], ...] = ()
    ledger_keys: str = ""
    heartbeats: bool = False
    slice_s: float | None = None
    poll_s: float = 0.1
    commit_s: float = 1.0
    transaction_timeout_s: float = 60.0
    start_positions: Callable[[], Mapping[PartitionKey, int]] | None = field(default=None, compare=False)
    bounded: bool = False
    budget: StepBudget = StepBudget()  # noqa: RUF009 - frozen
    counters_s: float | None = None
    unnoted: tuple[Topic, ...] = ()
    shards: int = 1

    @property
    def group(self) -> str:
        return group_name(self.run, self.pipeline, self.shard)

    def session(self) -> SessionConfig:
        """The configuration of this shard's Kafka session."""
        return SessionConfig(
            client=self.client,
            group=self.group,
            inputs=tuple(
                Input(r.topic.name(self.run), r.partitions, r.start, r.newest, self.start_positions is not None)
                for r in self.inputs
            ),
            restore=Partition(RESTORE.name(self.run), 0),
            ledger=self._partitions(self.ledger),
            owned=self._partitions(self.owned),
            ledger_keys=self.ledger_keys.encode(),
            heartbeats=ProcessHeartbeats(Partition(REPLICAS.name(self.run), 0), self.run, self.shard)
            if self.heartbeats
            else None,
            transaction_timeout_s=self.transaction_timeout_s,
            shards=self.shards,
            of_newest=(NEWEST_MANIFEST,),
        )

    def _partitions(self, topics: tuple[tuple[Topic, tuple[int, ...]], ...]) -> tuple[Partition, ...]:
        return tuple(Partition(topic.name(self.run), p) for topic, partitions in topics for p in partitions)
