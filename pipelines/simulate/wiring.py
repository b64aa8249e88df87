"""The pipelines of a run as plain objects: the shard, the step and the maps that `pipelines/*.py` chain for Beam."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from operators.evaluation.evaluate_versions import EvaluateVersions
from operators.io.config import ShardConfig
from operators.io.fold_records import FoldRecords
from operators.io.map_outputs import MapOutputs, OutputFunction
from operators.io.read_topics import ReadTopics
from operators.prompts.rendering import render
from operators.prompts.synthetic import SyntheticSource, SyntheticTokenizer
from operators.trainer.emulate_training import EmulateTraining
from pipelines.config import Config
from pipelines.roles import Role, roles_of
from pipelines.shards import topic_input
from schemas.records import Prompt
from schemas.topics import RELAY_CHAIN

QUESTIONS = 2
"""Held-out questions of a simulated run."""
POLL_S = 1.0
"""How long an idle poll waits. Records wake it, so only the roles that follow a clock need short ones."""
FAST_POLL_S = 0.5


@dataclass(frozen=True)
class Wiring:
    """What a role runs: the shard that it reads and writes, the step that folds, and the maps after it."""

    role: Role
    shard: ShardConfig
    step: Any
    maps: tuple[OutputFunction, ...]


@dataclass(frozen=True)
class SyntheticQuestions:
    """The held-out questions of a run with synthetic prompts."""

    config: Config
    count: int

    def __call__(self) -> list[Prompt]:
        (task,) = self.config.prompts.mixture
        source, tokenizer = SyntheticSource(replace(task, size=self.count)), SyntheticTokenizer(task.prompt_tokens)
        context = self.config.context
        return [
            render(source[n], n, task, tokenizer, context, purpose="evaluation", samples=1) for n in range(self.count)
        ]


def wire(config: Config, questions: int = QUESTIONS, relays: int = 0) -> list[Wiring]:
    """The roles of an emulated run, its evaluation with as many `questions`, and `relays` of its weights.

    Raises ValueError for a run that is not emulated.
    """
    if not config.emulated:
        raise ValueError(f"rollout.engine is {config.rollout.engine!r}: only emulated runs are simulated")
    roles = [*roles_of(config), *([Role("evaluation")] if config.evaluation.every else [])]
    roles += [Role("relay", index) for index in range(relays)]
    found = [_wiring(config, role, questions) for role in roles]
    return [_with_chain(config, each) if relays and isinstance(each.step, EmulateTraining) else each for each in found]


def _with_chain(config: Config, trainer: Wiring) -> Wiring:
    """An emulated trainer with the input by which a real one learns to whom it sends its versions."""
    shard = trainer.shard
    chain = topic_input(config, RELAY_CHAIN, start="earliest")
    return replace(trainer, shard=replace(shard, inputs=(*shard.inputs, chain)))


class _Chain:
    """Collects the transforms that are applied to it. Building Beam's graph of a role takes a hundred times as long."""

    def __init__(self) -> None:
        self.transforms: list[Any] = []

    def __or__(self, transform: Any) -> _Chain:
        self.transforms.append(getattr(transform, "transform", transform))  # `"label" >> transform` wraps it
        return self


def _wiring(config: Config, role: Role, questions: int) -> Wiring:
    chain: Any = _Chain()
    importlib.import_module(f"pipelines.{role.pipeline}").build(chain, config=config, **role.build_arguments)
    parts = chain.transforms
    (shard,) = next(part for part in parts if isinstance(part, ReadTopics)).shards
    step = next(part for part in parts if isinstance(part, FoldRecords)).step
    if isinstance(step, EvaluateVersions):
        step = replace(step, questions=SyntheticQuestions(config, questions))
    shard = replace(shard, poll_s=FAST_POLL_S if role.pipeline in ("rollout", "trainer") else POLL_S)
    return Wiring(role, shard, step, tuple(part.function for part in parts if isinstance(part, MapOutputs)))
