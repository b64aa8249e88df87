"""export: writes a topic to files, exactly once. It resumes from the manifests in its folder; it writes no records."""

from __future__ import annotations

import hashlib

import apache_beam as beam

from infra.kafka.properties import ClientProperties
from operators.export.config import ExportConfig
from operators.export.export_topic import ExportTopic, StartPositions
from operators.io.config import ShardConfig, TopicInput
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from schemas.codec import record_type


def build(
    pipeline: beam.Pipeline, config: ExportConfig, client: ClientProperties, transaction_timeout_s: float
) -> None:
    """Consumes any topic, writes files. The committed offsets are for display only."""
    source = shard_config(config, client, transaction_timeout_s)
    (
        pipeline
        | "read topic" >> ReadTopics(source)
        | "collect rows and write files"
        >> FoldRecords(ExportTopic(config), "collect rows", "write files", dead_letters=False)
        | "commit offsets" >> WriteTransactionally(source)
    )


def shard_config(config: ExportConfig, client: ClientProperties, transaction_timeout_s: float) -> ShardConfig:
    """The shard_config: all partitions of the topic. Each folder has its own consumer group."""
    contents = config.contents
    columnar = all(record_type(kind).encoding == "arrow" for kind in contents.source.record_classes)
    folder = hashlib.sha256(str(config.folder.absolute()).encode()).hexdigest()[:8]
    return ShardConfig(
        client=client,
        run=contents.run,
        pipeline=f"export-{contents.topic}-{folder}",
        inputs=(TopicInput(contents.source, tuple(sorted(contents.starts)), blocks=columnar),),
        start_positions=StartPositions(config, client),
        bounded=not config.follow,
        commit_s=5.0,
        transaction_timeout_s=transaction_timeout_s,
    )
