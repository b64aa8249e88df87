"""trainer: consumes batches, publishes weight versions."""

from __future__ import annotations

import apache_beam as beam

from infra.storage import StorageFolder, open_storage
from operators.io.config import ShardConfig, TopicInput
from operators.io.fold_records import FoldRecords, FoldStep
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.trainer.emulate_training import EmulateTraining
from pipelines.config import Config
from pipelines.shards import shard_config, store_folder, topic_input
from schemas.topics import BATCHES, RELAY, RELAY_CHAIN, batch_partitions


def build(pipeline: beam.Pipeline, config: Config, rank: int = 0) -> None:
    """Rank 0 consumes batches, relay and relay-chain, and produces relay and metrics; other ranks consume batches."""
    if not 0 <= rank < config.trainer.ranks:
        raise ValueError(f"rank {rank} does not exist: trainer.ranks is {config.trainer.ranks}")
    inputs = [TopicInput(BATCHES, tuple(batch_partitions(rank, config.experience.shards)))]
    if rank == 0:
        inputs.append(topic_input(config, RELAY))
        inputs += [] if config.emulated else [topic_input(config, RELAY_CHAIN, start="earliest")]
    owned = () if rank else ((RELAY, (0,)),)
    source = shard_config(config, "trainer", *inputs, owned=owned, index=rank, fast_poll=config.emulated)
    train, resumed = _emulation(config, source) if config.emulated else _training(config, source, rank)
    (
        pipeline
        | "read batches" >> ReadTopics(resumed)
        | "train" >> FoldRecords(train)
        | "write metrics" >> WriteTransactionally(source)
    )


def checkpoints_of(config: Config) -> StorageFolder:
    """The folder of the run's checkpoints."""
    folder = config.trainer.checkpoint_folder
    return open_storage(folder) / config.run.name if folder else config.run_folder / "checkpoints"


def _training(config: Config, source: ShardConfig, rank: int) -> tuple[FoldStep, ShardConfig]:
    from operators.trainer.publishing import PublishSettings
    from operators.trainer.train_batches import TrainBatches  # deferred: imports torch
    from operators.trainer.train_follower import TrainFollower

    checkpoints, rendezvous_file = checkpoints_of(config), config.run_folder / "checkpoints" / "ranks.json"
    if rank:
        shards = config.experience.shards
        follower = TrainFollower(
            config.trainer, source, config.model_folder(), checkpoints, rank, shards, rendezvous_file
        )
        return follower, follower.resumed()
    train = TrainBatches(
        config=config.trainer,
        shard=source,
        model=config.model_folder(),
        store=store_folder(config),
        checkpoints=checkpoints,
        result=config.run_folder / "model",
        keep_versions=config.relay.keep_versions,
        publish=PublishSettings(
            config.relay.token(),
            config.relay.chunk_bytes,
            config.relay.max_megabytes_per_s,
            config.relay.deltas,
            config.relay.tls(),
        ),
        shards=config.experience.shards,
        rendezvous_file=rendezvous_file,
    )
    return train, train.resumed()


def _emulation(config: Config, source: ShardConfig) -> tuple[FoldStep, ShardConfig]:
    scale, stride = config.run.time_scale, config.rollout.emulation.stride
    return EmulateTraining(config.trainer, source, scale, stride, config.experience.shards), source
