"""placement: the rollout manager. It assigns prompts to replicas, through the replicas' inboxes."""

from __future__ import annotations

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.repartition import RepartitionTrajectories
from operators.io.write_transactionally import WriteTransactionally
from operators.placement.place_trajectories import PlaceTrajectories
from pipelines.config import Config
from pipelines.shards import partitions_of, shard_config, topic_input
from schemas.topics import (
    CONTROL,
    EVAL_PROMPTS,
    INBOX,
    PROGRESS,
    PROMPTS,
    RELAY,
    RELAY_CHAIN,
    REPLICAS,
    SETTLED,
    TRAJECTORIES,
)


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Consumes prompts, heartbeats, progress, trajectories, settled, relay and control; produces inbox, progress
    (closed), trajectories (failed), plans, relay-chain and the metrics of a pause and of work that waits.
    """
    source = shard_config(
        config,
        "placement",
        *(topic_input(config, topic) for topic in (PROMPTS, EVAL_PROMPTS, PROGRESS)),
        topic_input(config, TRAJECTORIES, blocks=True),
        *(topic_input(config, topic) for topic in (SETTLED, RELAY)),
        topic_input(config, RELAY_CHAIN, start="earliest"),
        topic_input(config, CONTROL, start="earliest"),
        topic_input(config, REPLICAS, start="latest"),
        ledger=(INBOX,),
        owned=((INBOX, partitions_of(config, INBOX)),),
    )
    place = PlaceTrajectories(
        config.placement,
        source,
        config.kafka.partitions,
        admitted=config.admitted,
        hosted=config.rollout.replicas,
        replicas=len(partitions_of(config, INBOX)),
        global_batch=config.experience.global_batch,
        relay_schedule=config.relay.schedule,
        goal=config.trainer.optimizer_steps,
    )
    (
        pipeline
        | "read work and replicas" >> ReadTopics(source)
        | "track and decide" >> FoldRecords(place, "track trajectories", "recover lost ones", "plan moves", "dispatch")
        | "repartition trajectories" >> RepartitionTrajectories()
        | "write inboxes, dead letters" >> WriteTransactionally(source)
    )
