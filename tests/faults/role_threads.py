"""The roles of an emulated run in threads of one process, with their real sources, steps and sinks.

The roles use Kafka as they do in their own processes; the supervisor and Beam are left out. A role that is fenced or
whose sink breaks is restarted, as in a run.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from infra.kafka.session import SessionLost
from operators.evaluation.config import EvaluationConfig
from operators.evaluation.evaluate_versions import EvaluateVersions
from operators.evaluation.report_rounds import ask_questions, report_rounds
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.fold_records import FoldRecords, FoldStep, _FoldFn, is_busy
from operators.io.map_outputs import MapOutputs, OutputFunction, map_emission
from operators.io.read_topics import ReadTopics
from operators.io.shards import close_shards
from operators.io.sink import SinkBroken, drop_sink
from operators.io.source import ShardSource
from operators.io.write_transactionally import _CommitFn
from pipelines.config import Config
from pipelines.roles import AGENT_PIPELINES, Role, roles_of
from pipelines.shards import shard_config, topic_input
from schemas.columns import token_ids
from schemas.records import AGENT, Assignment, Prompt, Sampling
from schemas.topics import EXPERIENCES, RELAY

log = logging.getLogger(__name__)
QUESTIONS = 2
NOT_EMULATED = (*AGENT_PIPELINES, "relay")
"""Roles that an emulated run leaves out. Agents and relay write only notes, counters and dead letters, the gateway also
its metric; here no agent plays, and no weights arrive."""
NOTES_S = 0.2
"""How often they commit: by default up to 5 s apart."""


class _Graph:
    """A stand-in for a Beam pipeline: records the transforms applied to it."""

    def __init__(self) -> None:
        self.transforms: list[Any] = []

    def __or__(self, named: Any) -> _Graph:
        self.transforms.append(named.transform)
        return self


@dataclass(frozen=True)
class _PlayedByAgents:
    """`step`, for which every assignment is that of an agent's episode: emulated prompts have no environment."""

    step: FoldStep

    def restore(self, restored: Restored) -> ShardFold:
        return _PlayedFold(self.step.restore(restored))


@dataclass(frozen=True)
class _PlayedFold(ShardFold):
    inner: ShardFold

    def fold(self, polled: Polled) -> Sequence[Any]:
        return self.inner.fold(replace(polled, records=tuple(map(_of_agent, polled.records))))

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return self.inner.checkpoint(positions)

    def close(self) -> None:
        self.inner.close()


def _of_agent(received: ReceivedRecord) -> ReceivedRecord:
    record = received.record
    if not isinstance(record, Assignment):
        return received
    played = replace(record.prompt, environment=AGENT, reference="{}")  # it has been validated as one without an agent
    return received._replace(record=replace(record, prompt=played))


class RoleThread:
    """One role, running until it is closed."""

    def __init__(self, name: str, source: ShardConfig, step: FoldStep, *maps: OutputFunction) -> None:
        self.name, self.config, self._step, self._maps = name, source, step, maps
        self.starts = 0
        self.error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"role {name}", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Config, role: Role) -> RoleThread:
        """The role with the source and step of its pipeline."""
        graph = _Graph()
        importlib.import_module(f"pipelines.{role.pipeline}").build(graph, config=config, **role.build_arguments)
        read, fold, *maps, _ = graph.transforms
        assert isinstance(read, ReadTopics)
        assert isinstance(fold, FoldRecords)
        assert all(isinstance(each, MapOutputs) for each in maps)
        shard, step = read.shards[0], fold.step
        if role.pipeline in NOT_EMULATED:
            shard, step = replace(shard, commit_s=NOTES_S), _PlayedByAgents(step)
        return cls(role.name, shard, step, *(each.function for each in maps))

    def close(self) -> None:
        """Stop after the current poll."""
        self._closed.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), f"{self.name} does not stop"

    def _run(self) -> None:
        while not self._closed.is_set():
            self.starts += 1
            source = ShardSource(self.config)
            try:
                self._work(source)
            except (SessionLost, SinkBroken) as error:
                log.warning("restarting %s: %s", self.name, error)
            except BaseException as error:
                self.error = error
                log.exception("%s has failed", self.name)
                return
            finally:
                drop_sink(self.config.group)
                source.close()

    def _work(self, source: ShardSource) -> None:
        fold, commit = _FoldFn(self._step), _CommitFn((self.config,))
        while not self._closed.is_set():
            element = source.next(wait=not is_busy(self.config.group))
            for emission in fold.process(element):
                commit.process(reduce(map_emission, self._maps, emission))


def start_roles(config: Config, names: Sequence[str] = ()) -> list[RoleThread]:
    """Start the roles `names` of an emulated run, also those of NOT_EMULATED; empty: all.

    Evaluation sends two questions to every version.
    """
    roles = [RoleThread.of(config, role) for role in roles_of(config) if not names or role.name in names]
    if others := [role for role in map(Role, NOT_EMULATED) if not names or role.name in names]:
        model = replace(config.model, path=str(_tokenizer(config.run_folder / "tokenizer")))
        roles += [RoleThread.of(replace(config, model=model), role) for role in others]
    if names and "evaluation" not in names:
        return roles
    experiences, versions = topic_input(config, EXPERIENCES, keys=("e",)), topic_input(config, RELAY, start="earliest")
    source = shard_config(config, "evaluation", experiences, versions)
    evaluate = EvaluateVersions(EvaluationConfig(every=1, periodic_questions=QUESTIONS), _questions)
    return [*roles, RoleThread("evaluation", source, evaluate, ask_questions, report_rounds)]


def close_roles(roles: Sequence[RoleThread]) -> None:
    """Stop all roles, and close their shards in this process."""
    for role in roles:
        role._closed.set()
    for role in roles:
        role.close()
    close_shards()


def _questions() -> list[Prompt]:
    sampling = Sampling(1.0, 1.0, 0, 64, (), 0)
    return [Prompt(n, "evaluation", "synthetic", "", token_ids([1] * 8), "{}", 1, sampling) for n in range(QUESTIONS)]


def _tokenizer(folder: Path) -> Path:
    """The new folder of a tokenizer, which the gateway loads."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(folder)
    return folder
