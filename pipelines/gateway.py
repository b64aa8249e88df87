"""gateway: answers the requests of agents over HTTP, from what rollouts generate."""

from __future__ import annotations

import json
from pathlib import Path

import apache_beam as beam

from operators.agents.config import AgentsConfig
from operators.gateway.config import GatewayConfig
from operators.gateway.serve_agents import HandOut, ServeAgents
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config, plain_table
from pipelines.distribution import PYTHON
from pipelines.shards import files_folder, shard_config, topic_input
from schemas.topics import INBOX, PROGRESS, TRAJECTORIES


def build(pipeline: beam.Pipeline, config: Config, process: int = 0) -> None:
    """Consumes inbox (assignments and requests), progress and trajectories; produces requests to inboxes."""
    source = shard_config(
        config, "gateway", *(topic_input(config, topic) for topic in (INBOX, PROGRESS, TRAJECTORIES)), index=process
    )
    agents = config.agents or AgentsConfig()
    serve = ServeAgents(
        config.gateway or GatewayConfig(),
        source,
        Path(config.model.path),
        files_folder(config),
        config.kafka.partitions,
        config.context,
        _most_tokens(config),
        (*PYTHON, "-m", "pipelines.serve_versions"),
        json.dumps(plain_table(config)),
        None if agents.runs_here else HandOut(agents.timeout_s, agents.retries),
    )
    (
        pipeline
        | "read episodes" >> ReadTopics(source)
        | "serve agents" >> FoldRecords(serve, "track episodes")
        | "write dead letters" >> WriteTransactionally(source)
    )


def _most_tokens(config: Config) -> int:
    """How many tokens of an episode may be trained: a learner has memory for a context, or for a micro-batch."""
    learner = max(config.context, config.trainer.learner.micro_batch_tokens)
    return min(config.experience.micro_batch_tokens, learner)
