"""gateway: answers the requests of agents over HTTP, from what rollouts generate."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam

from operators.gateway.config import GatewayConfig
from operators.gateway.serve_agents import ServeAgents
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import shard_config, topic_input
from schemas.topics import INBOX, PROGRESS, TRAJECTORIES


def build(pipeline: beam.Pipeline, config: Config, process: int = 0) -> None:
    """Consumes inbox (assignments and requests), progress and trajectories; produces requests to inboxes."""
    source = shard_config(
        config,
        "gateway",
        *(topic_input(config, topic) for topic in (INBOX, PROGRESS, TRAJECTORIES)),
        index=process,
    )
    serve = ServeAgents(
        config.gateway or GatewayConfig(),
        source,
        Path(config.model.path),
        config.run_folder,
        config.kafka.partitions,
        config.context,
    )
    (
        pipeline
        | "read episodes" >> ReadTopics(source)
        | "serve agents" >> FoldRecords(serve, "track episodes")
        | "write dead letters" >> WriteTransactionally(source)
    )
