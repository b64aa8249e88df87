"""Factories of records for tests of the operators: a call names only the fields that its test needs."""

from __future__ import annotations

from typing import Any

from infra.kafka.properties import ClientProperties
from operators.io.config import ShardConfig, TopicInput
from schemas import records as r
from schemas.columns import flags, floats, token_ids
from schemas.topics import CATALOGUE, Topic

PARTITIONS = 2
MAX_REPLICAS = 4
CLIENT = ClientProperties.at("localhost:1")
SAMPLING = r.Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop_token_ids=(0,), seed=0)


def version(number: int, epoch: int = 1) -> r.PolicyVersion:
    return r.PolicyVersion(epoch, number)


def prompt(number: int, samples: int = 2, **changes: Any) -> r.Prompt:
    fields = {
        "number": number,
        "purpose": "train",
        "task": "chain_sum",
        "text": f"question {number}",
        "token_ids": token_ids([1, 2, 3]),
        "reference": "{}",
        "samples": samples,
        "sampling": SAMPLING,
    }
    return r.Prompt(**(fields | changes))


def trajectory(
    asked: r.Prompt, member: int, tokens: int = 2, under: r.PolicyVersion | None = None, **changes: Any
) -> r.Trajectory:
    under = under or version(0)
    fields = {
        "prompt": asked,
        "member": member,
        "lease": 1,
        "attempt": 1,
        "replica": 0,
        "incarnation": 1,
        "response": r.Response(token_ids([5] * tokens), floats([-0.5] * tokens), flags([True] * tokens)),
        "text": "5",
        "version_spans": (r.VersionSpan(under, tokens),) if tokens else (),
        "newest_version": under,
        "finish_reason": "stop",
        "error": None,
        "started_at": 0,
        "first_token_at": None,
        "finished_at": 0,
    }
    return r.Trajectory(**(fields | changes))


def failed(asked: r.Prompt, member: int, error: str = "given up", **changes: Any) -> r.Trajectory:
    return trajectory(asked, member, tokens=0, finish_reason="failed", error=error, **changes)


def experience(of: r.Trajectory, reward: float = 1.0, **changes: Any) -> r.Experience:
    fields = {"trajectory": of, "reward": reward, "components": (), "error": None, "scored_at": 0}
    return r.Experience(**(fields | changes))


def settled(name: str, group_size: int = 2, outcome: r.Outcome = "batched", batch: int | None = None) -> r.Settled:
    return r.Settled(name, group_size, outcome, "", batch, None, 0, 0)


def manifest(
    of: r.PolicyVersion, batches: tuple[int, ...] = (), parent: r.PolicyVersion | None = None, **changes: Any
) -> r.WeightVersion:
    fields = {
        "version": of,
        "parent": parent,
        "step": of.number,
        "file": "",
        "bytes": 0,
        "blake3": "",
        "tensors": (),
        "batches": batches,
        "batch_offsets": (),
        "trajectories_trained": 0,
        "final": False,
        "created_at": 0,
    }
    return r.WeightVersion(**(fields | changes))


def status(replica: int, under: r.PolicyVersion | None, incarnation: int = 1, **changes: Any) -> r.ReplicaStatus:
    fields = {
        "replica": replica,
        "process": replica,
        "incarnation": incarnation,
        "state": "running" if under is not None else "starting",
        "policy_version": under,
        "running": 0,
        "waiting": 0,
        "capacity": 4,
        "kv_used": 0,
        "kv_capacity": 100,
        "tokens_generated": 0,
        "step_seconds": 0.0,
        "host": "",
        "pid": 0,
        "sent_at": 0,
        "run": "run",
    }
    return r.ReplicaStatus(**(fields | changes))


def topic_input(topic: Topic, **how: Any) -> TopicInput:
    return TopicInput(topic, partitions(topic), **how)


def partitions(topic: Topic) -> tuple[int, ...]:
    counts = {"one": 1, "shards": PARTITIONS, "batch shares": 1, "replicas": MAX_REPLICAS}
    return tuple(range(counts[topic.partitions]))


def shard(pipeline: str, *inputs: TopicInput, ledger: tuple[str, ...] = (), index: int = 0, **how: Any) -> ShardConfig:
    topics = tuple((CATALOGUE[short_name], partitions(CATALOGUE[short_name])) for short_name in ledger)
    return ShardConfig(CLIENT, "run", pipeline, index, inputs, topics, **how)
