"""trainer: batches in, weight versions out."""

from __future__ import annotations

import apache_beam as beam

from operators.io.config import ShardConfig
from operators.io.fold_records import FoldRecords, Step
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.trainer.emulate_training import EmulateTraining
from pipelines.config import Config
from pipelines.shards import reading, shard, store_folder
from schemas.topics import BATCHES, RELAY, RELAY_CHAIN


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Batches, relay, relay-chain → relay, metrics."""
    source = shard(
        config,
        "trainer",
        reading(config, BATCHES),
        reading(config, RELAY, start="earliest"),
        *(() if config.emulated else (reading(config, RELAY_CHAIN, start="earliest"),)),
        attentive=config.emulated,
    )
    train, resumed = (_emulation if config.emulated else _training)(config, source)
    (
        pipeline
        | "read batches" >> ReadTopics(resumed)
        | "train" >> FoldRecords(train)
        | "write metrics" >> WriteTransactionally(source)
    )


def _training(config: Config, source: ShardConfig) -> tuple[Step, ShardConfig]:
    from operators.trainer.publishing import WayToRelays
    from operators.trainer.train_batches import TrainBatches  # here: it imports torch

    train = TrainBatches(
        config=config.trainer,
        shard=source,
        model=config.model_folder(),
        store=store_folder(config),
        checkpoints=config.run_folder / "checkpoints",
        result=config.run_folder / "model",
        keep_versions=config.relay.keep_versions,
        way=WayToRelays(
            config.relay.token(), config.relay.chunk_bytes, config.relay.max_megabytes_per_s, config.relay.deltas
        ),
    )
    return train, train.resumed()


def _emulation(config: Config, source: ShardConfig) -> tuple[Step, ShardConfig]:
    return EmulateTraining(config.trainer, source, config.run.time_scale, config.rollout.emulation.stride), source
