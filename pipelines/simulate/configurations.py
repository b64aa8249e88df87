"""The configurations that histories are drawn from: small runs of every schedule and shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pipelines.config import Config, parse_config
from pipelines.simulate.wiring import QUESTIONS, Wiring, wire

BASE: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "simulated"},
    "kafka": {"bootstrap_servers": "simulated:9092", "partitions": 1, "transaction_timeout_s": 10.0},
    "prompts": {
        "source": "synthetic",
        "prompt_tokens": 4,
        "max_new_tokens": 60,
        "samples_per_prompt": 2,
        "size": 10,
        "epochs": 1,
    },
    "rollout": {
        "engine": "emulated",
        "processes": 2,
        "replicas": 1,
        "slots": 4,
        "context": 64,
        "step_s": 0.0,
        "linger_s": 0.5,
        "heartbeat_s": 2.0,
        "progress_tokens": 16,
        "progress_s": 2.0,
        "termination_notice_s": 12.0,
        "kv_megabytes": 0,
        "emulation": {
            "block": 4,
            "pull_s": 0.2,
            "roofline": {"decode_ms": [[1, 100.0], [8, 160.0]], "decode_context": 32},
            "lengths": {"p50": 12, "p99": 60},
        },
    },
    "placement": {"heartbeat_timeout_s": 8.0, "repack_s": 3.0, "max_replicas": 4, "prompt_lead": 6},
    "score": {"answer": "whole", "rewards": [{"name": "length", "options": {"target": 20, "limit": 60}}]},
    "experience": {"global_batch": 4, "micro_batch_tokens": 192, "max_staleness": 1},
    "trainer": {
        "optimizer_steps": 1000,
        "checkpoint_every": 2,
        "emulation": {"step_s": [[0, 2.0], [400, 5.0]], "stall_s": 0.1, "broadcast_s": 0.2},
    },
    "evaluation": {"every": 2, "periodic_questions": 1},
}
"""A run of ten prompts with two samples, in batches of four. One emulated token takes a tenth of a second."""

LONG_EVALUATION = "long evaluation"
LONG_ANSWERS = "long answers"
"""Answers whose owner may be replaced twice, each time before its first Progress."""
_RELAYED = {
    "relay.store": "simulated",
    "relay.chunk_bytes": 4096,
    "relay.deltas": False,
    "rollout.kv_megabytes": 1,
    "evaluation.every": 0,
}
_TRAINED = {
    **_RELAYED,
    "model.path": ".",
    "trainer.learner.name": "pipelines.simulate.simulated_learner:SimulatedLearner",
    "trainer.collective_timeout_s": 20.0,
    "evaluation.every": 2,
}
_RANKS = {**_TRAINED, "trainer.ranks": 2, "trainer.batch_shares": 2}
_LONG = {"rollout.emulation.lengths": {"p50": 40, "p99": 60}}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "with a goal": {"trainer.optimizer_steps": 3},
    "groups that fill no batch": {"prompts.samples_per_prompt": 3, "experience.global_batch": 5},
    "group above the bound": {"prompts.samples_per_prompt": 6, "prompts.size": 4, "experience.max_staleness": 0},
    "in step": {"experience.max_staleness": 0, "rollout.processes": 1},
    "two shards": {"kafka.partitions": 2, "experience.shards": 2},
    "score shards": {"kafka.partitions": 3, "score.shards": 2},
    "buffer shards": {"kafka.partitions": 4, "experience.shards": 2, "experience.max_shards": 3},
    "curriculum": {
        "prompts.levels": [{}, {}, {}],
        "prompts.size": None,
        "prompts.epochs": None,
        "trainer.optimizer_steps": 8,
        "experience.sampler": {
            "name": "curriculum",
            "options": {"harder_above": 0.95, "easier_below": 0.9, "least": 4},
        },
    },
    LONG_ANSWERS: {
        "prompts.max_new_tokens": 400,
        "prompts.size": 6,
        "rollout.context": 448,
        "rollout.emulation.lengths": {"p50": 250, "p99": 400},
        "rollout.processes": 3,
        "rollout.progress_tokens": 400,
        "rollout.progress_s": 30.0,
    },
    "two replicas a process": {"rollout.replicas": 2, "experience.max_staleness": 2, **_LONG},
    "repack": {"rollout.replicas": 2, "rollout.slots": 6, "placement.repack_s": 1.0, **_LONG},
    "synchronous": {"placement.schedule": "synchronous"},
    "one_step": {"placement.schedule": "one_step", "evaluation.every": 0, "trainer.optimizer_steps": 4},
    "stream": {"placement.schedule": "stream"},
    "partial_rollout": {"placement.schedule": "partial_rollout", **_LONG},
    "slots": {"placement.refresh": "slot", "experience.max_staleness": 2, **_LONG},
    LONG_EVALUATION: {"rollout.processes": 1, "evaluation.sampled": False, "prompts.size": 16},
    "wait for age": {"experience.over_age": "wait"},
    "drop by age": {"experience.over_age": "drop", "experience.max_staleness": 0, **_LONG},
    "little memory": {"rollout.kv_capacity": 96, "rollout.slots": 6, **_LONG},
    "two partitions": {"kafka.partitions": 2, "prompts.samples_per_prompt": 3},
    "relays": _RELAYED,
    "relays with deltas": {**_RELAYED, "relay.deltas": True, "relay.keep_versions": 2, "evaluation.every": 2},
    "relays in a tree": {**_RELAYED, "relay.schedule": "tree", "rollout.processes": 1},
    "relays by a binomial pipeline": {**_RELAYED, "relay.schedule": "binomial", "rollout.processes": 1},
    "relays apart from the trainer": _RELAYED,
    "a real trainer": _TRAINED,
    "ranks": _RANKS,
    "ranks with a goal": {**_RANKS, "trainer.optimizer_steps": 4, "experience.micro_batch_tokens": 64},
    "relays and moves": {
        **_RELAYED,
        "rollout.slots": 6,
        "rollout.replicas": 2,
        "rollout.kv_capacity": 96,
        "placement.repack_s": 1.0,
        "experience.max_staleness": 2,
        "prompts.samples_per_prompt": 4,
        "prompts.size": 8,
        **_LONG,
    },
}
"""Changes to BASE, by the name of the shape; None unsets a key."""
SHAPE_WEIGHTS: Mapping[str, float] = {LONG_ANSWERS: 2.0, "ranks": 3.0, "ranks with a goal": 3.0}
"""How often shapes are drawn, compared with the others."""
LONG_QUESTIONS = 24
"""Held-out questions of the shape whose first evaluation takes longer than several optimizer steps."""


RELAYS: Mapping[str, int] = {
    "relays": 3,
    "relays with deltas": 3,
    "relays in a tree": 5,
    "relays by a binomial pipeline": 4,
    "relays apart from the trainer": 2,
    "a real trainer": 2,
    "ranks": 2,
    "ranks with a goal": 2,
    "relays and moves": 3,
}
"""The relays of the shapes that have some, each on a host of its own; in other shapes versions and KV have no bytes."""
TRAINER_APART = {"relays apart from the trainer", "ranks with a goal"}
"""The shapes whose trainer is on a host without a relay."""


@cache
def configuration(shape: str) -> Config:
    """The configuration of a shape. Raises ValueError for an unknown one."""
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}: choose from {', '.join(SHAPES)}")
    table = _copy(BASE)
    for path, value in SHAPES[shape].items():
        *sections, key = path.split(".")
        section = table
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            del section[key]
        else:
            section[key] = value
    return parse_config(table, f"shape {shape!r}")


@cache
def wiring(shape: str) -> tuple[Wiring, ...]:
    """The roles of a shape."""
    questions = LONG_QUESTIONS if shape == LONG_EVALUATION else QUESTIONS
    return tuple(wire(configuration(shape), questions, RELAYS.get(shape, 0)))


def has_goal(shape: str) -> bool:
    """Whether runs of a shape end after a number of optimizer steps."""
    return configuration(shape).trainer.optimizer_steps < BASE["trainer"]["optimizer_steps"]


def resharded_role(config: Config) -> str | None:
    """The role that gets another number of shards when a run is resumed; None if all have a single shard."""
    if config.experience.max_shards > 1:
        return "experience"
    return "score" if config.score.shards > 1 else None


def resumed_roles(shape: str, config: Config) -> tuple[Wiring, ...]:
    """The roles of a run of a shape that is resumed with `config`."""
    return tuple(wire(config, QUESTIONS, RELAYS.get(shape, 0)))


def _copy(table: Any) -> Any:
    return {key: _copy(value) for key, value in table.items()} if isinstance(table, Mapping) else table
