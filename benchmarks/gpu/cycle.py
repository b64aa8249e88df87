"""Rounds of generation, update, publication and load by one process: the engine and the learner take turns on a device.

The reward is the share of a response's tokens whose embedding begins with a positive number. A model with random
weights can learn that: half of its tokens do, and one direction of its hidden state tells them from the others.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_sides import completions
from benchmarks.engine_weights import load_version
from benchmarks.gpu.batches import GROUP, training_batch
from benchmarks.gpu.engine import PROMPT, dtype_of, open_engine, root_of_two
from benchmarks.gpu.figures import Figure, peak_bytes, synchronize
from benchmarks.gpu.learner import learner_config
from benchmarks.gpu.settings import GIB, Settings
from benchmarks.stores import publish, temporary_store
from infra.models.dtypes import tensor_specs
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from operators.rollout.engine import Request
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.joint_actions import JointActions
from operators.trainer.learner import Learner
from operators.trainer.rendezvous import Rendezvous
from schemas.identity import trajectory_id
from schemas.records import MicroBatch, PolicyVersion, Sampling

LEARNING_RATE = 1e-3
"""Far above that of a trained model: random weights change much before they mean anything."""


def cycle(settings: Settings, model: Path) -> list[Figure]:
    """How the rounds divide their time, whether the reward rises, and how far the logprobs of both sides differ."""
    engine = open_engine(settings, model)
    config = replace(learner_config(settings, "bfloat16"), learning_rate=LEARNING_RATE, warmup_steps=0)
    learner = Learner(config, model, settings.device)
    weights = learner.weights(dtype_of(settings))
    good = (engine.model.get_input_embeddings().weight[:, 0] > 0).cpu().numpy()
    marks: list[list[float]] = []
    rewards, mismatches = [], []
    specs = tensor_specs(weights.specs())
    joint = JointActions(Rendezvous(), torch.device(settings.device), weights, learner.weights())
    with (
        temporary_store(root_of_two(model)) as store,
        closing(Publisher(store, lambda _: None, specs)) as publisher,
    ):
        version = PolicyVersion(1, 0)
        _load(engine, store, publisher, joint, version)  # the learner's weights, rounded as later ones
        for number in range(settings.rounds):
            times = [_now(settings)]
            batch, reward = _generate(engine, settings, version, good)
            times.append(_now(settings))
            metrics = learner.update([batch])
            times.append(_now(settings))
            version = PolicyVersion(1, number + 1)
            _load(engine, store, publisher, joint, version)
            times.append(_now(settings))
            marks.append(times)
            rewards.append(reward)
            mismatches.append(metrics["mismatch/kl"])
    took = np.median(np.diff(marks[1:] or marks, axis=1), axis=0)
    sixth = -(-settings.rounds // 6)
    first = float(np.mean(rewards[:sixth]))
    rise = float(np.mean(rewards[-sixth:])) - first
    names = "generation", "update", "publication and load"
    return [
        *(Figure(f"a round: {name}", 1e3 * float(each), "ms") for name, each in zip(names, took, strict=True)),
        Figure("reward of the first rounds", first, ""),
        Figure(f"rise of the reward in {settings.rounds} rounds", rise, "", (">=", 0.02), "mean of the last sixth"),
        Figure("mismatch of the two sides", float(np.median(mismatches)), "nats", ("<=", 1e-2), "k3 a token"),
        Figure("peak memory", peak_bytes(settings.device) / GIB, "GiB"),
    ]


def _generate(
    engine: TransformersEngine, settings: Settings, version: PolicyVersion, good: np.ndarray
) -> tuple[MicroBatch, float]:
    """A training batch of what `engine` generates under `version`, and its mean reward; `good` is bool[vocabulary]."""
    source = np.random.default_rng([3, version.number])
    prompts = source.integers(1, 500, (settings.slots // GROUP, PROMPT)).astype(np.int32)
    sampling = Sampling(1.0, 1.0, 0, settings.response // 4, (), version.number)
    names = [(i, trajectory_id("train", version.number << 16 | i // GROUP, i % GROUP)) for i in range(settings.slots)]
    done = completions(engine, [Request(name, prompts[i // GROUP], sampling) for i, name in names])
    generated = [done[name].generated for _, name in names]
    rewards = np.array([good[each.token_ids].mean() for each in generated])
    token_ids = [np.concatenate([prompts[i // GROUP], each.token_ids]) for i, each in enumerate(generated)]
    logprobs = [np.concatenate([np.zeros(PROMPT), each.logprobs]) for each in generated]
    return training_batch(token_ids, PROMPT, logprobs, rewards, version), float(rewards.mean())


def _load(
    engine: TransformersEngine, store: WeightStore, publisher: Publisher, joint: JointActions, version: PolicyVersion
) -> None:
    """Publish the weights of `joint` as `version`, and load it into `engine`."""
    publish(publisher, joint, version)
    publisher.flush()
    load_version(engine, store, version)


def _now(settings: Settings) -> float:
    synchronize(settings.device)
    return time.perf_counter()
