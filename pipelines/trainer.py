"""trainer: batches in, weight versions out."""

from __future__ import annotations

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.trainer.train_batches import TrainBatches
from pipelines.config import Config
from pipelines.shards import reading, shard, store_folder
from schemas.topics import BATCHES, RELAY


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Batches → relay, metrics."""
    source = shard(config, "trainer", reading(config, BATCHES), reading(config, RELAY, start="earliest"))
    train = TrainBatches(
        config=config.trainer,
        shard=source,
        model=config.model_folder(),
        store=store_folder(config),
        checkpoints=config.run_folder / "checkpoints",
        result=config.run_folder / "model",
        keep_versions=config.relay.keep_versions,
    )
    (
        pipeline
        | "read batches" >> ReadTopics(train.resumed())
        | "train" >> FoldRecords(train)
        | "write metrics" >> WriteTransactionally(source)
    )
