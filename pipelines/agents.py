"""agents: runs the agents that play episodes."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam

from operators.agents.config import AgentsConfig
from operators.agents.run_agents import RunAgents
from operators.gateway.config import GatewayConfig
from operators.io.episode_keys import SECRET_FILE
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import files_folder, shard_config, topic_input
from schemas.topics import INBOX, TRAJECTORIES


def build(pipeline: beam.Pipeline, config: Config, process: int = 0) -> None:
    """Consumes inbox (assignments of episodes) and trajectories (their ends); starts agents."""
    source = shard_config(
        config, "agents", *(topic_input(config, topic) for topic in (INBOX, TRAJECTORIES)), index=process
    )
    gateway = config.gateway or GatewayConfig()
    run_agents = RunAgents(
        config.agents or AgentsConfig(),
        source,
        files_folder(config),
        Path(gateway.secret_file) if gateway.secret_file else config.run_folder / SECRET_FILE,
        config.kafka.partitions,
        process,
    )
    (
        pipeline
        | "read episodes" >> ReadTopics(source)
        | "run agents" >> FoldRecords(run_agents, "start agents")
        | "write dead letters" >> WriteTransactionally(source)
    )
