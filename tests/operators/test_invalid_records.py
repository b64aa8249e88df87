"""Invalid or foreign records on the topics of a run neither stop it nor are trained."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from climbing_sampler import CLIMB
from invalid_records import FAR, foreign_levels, invalid_records, is_decodable, level_key, variants
from pipeline_simulation import PipelineSimulation
from record_factories import shard as shard_of
from record_samples import PROMPT, RESPONSE, VERSION
from simulation_config import SimulationConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from infra.models.conversations import ConversationFormat
from operators.agents.config import AgentsConfig
from operators.agents.run_agents import RunAgents
from operators.gateway.chat_api import response_message
from operators.gateway.episode_table import EpisodeTable
from operators.io.elements import Polled, ReceivedRecord, Restored
from operators.io.fold_records import reject_invalid
from operators.io.validation import ManifestOrder, invalid_reason
from schemas.columns import token_ids
from schemas.identity import parse_trajectory_id
from schemas.records import AGENT, Assignment, MicroBatch, Progress, TurnEnded, TurnRequest, VersionSpan, WeightVersion
from schemas.topics import (
    BATCH_ASSEMBLY,
    BATCHES,
    CURRICULUM,
    DEAD_LETTERS,
    EXPERIENCES,
    INBOX,
    REPLICAS,
    SETTLED,
)

SKIPPED = (BATCHES, EXPERIENCES)
"""The toy trainer counts all batches; the buffer itself validates experiences (see `test_untrainable`)."""


@pytest.mark.parametrize("shards", [1, 2])
def test_run_completes_with_invalid_records_on_every_topic(shards: int) -> None:
    simulation = PipelineSimulation(
        0,
        SimulationConfig(samples=2, global_batch=4, staleness=1, prompts=30, shards=shards, sampler=CLIMB, levels=3),
    )
    simulation.checks = False
    for shard in simulation.shards:
        shard.validates = True
        shard.start()
    invalid = [(topic, record) for topic, record in invalid_records() if topic not in SKIPPED]
    invalid += [(CURRICULUM, record) for record in foreign_levels()]
    simulation.rng.shuffle(invalid)
    assert len(invalid) > 800
    written: Counter[str] = Counter()
    for topic, record in invalid:
        key = {REPLICAS: "rollout-3", BATCH_ASSEMBLY: type(record).__name__, INBOX: ""}.get(topic, "p")
        simulation.log.append(topic, record, level_key(record) if topic is CURRICULUM else key)
        written[type(record).__name__] += 1
        simulation.step()
    asked = {f"p{number}.{member}" for number in range(30) for member in range(2)}
    for _ in range(600):
        simulation.run_undisturbed()
        ended = Counter(
            record.trajectory_id for record in simulation.log.rows(SETTLED) if record.trajectory_id in asked
        )
        if len(asked - set(ended)) < 4:
            break
    assert max(ended.values()) == 1
    assert len(asked - set(ended)) < 4
    parts: list[MicroBatch] = simulation.log.rows(BATCHES)
    trained = Counter(name for part in parts for name in part.trajectory_ids)
    assert max(trained.values()) == 1
    assert all(parse_trajectory_id(name).number < FAR for name in trained)
    reasons = Counter(letter.step for letter in simulation.log.rows(DEAD_LETTERS))
    assert reasons["read relay"] > 100
    assert reasons["change levels"] > 10
    notes = [simulation.log.committed(shard.config.group).state for shard in simulation.experience]
    assert [note["curriculum"][""][:2] for note in notes] == [[2, 0]] * shards
    assert simulation.log.notes("prompts")[0].state["levels"][""] == [(0, 0), (1, 0), (2, 0)]
    levels = [each.reason for each in simulation.log.rows(DEAD_LETTERS) if "prompts has not begun level" in each.reason]
    assert len(levels) >= 6 * shards


def test_every_record_class_has_invalid_variants() -> None:
    refused = {type(record) for _, record in invalid_records() if invalid_reason(record) is not None}
    assert WeightVersion in refused
    assert len(refused) > 15


def episode(number: int) -> list[Any]:
    """The records of an agent's episode of one turn."""
    of, name = replace(PROMPT, number=number, environment=AGENT), f"p{number}.3"
    turn = (0, (), token_ids([4]), 8, (), "[]", "[]", False, 0)
    return [
        Assignment(of, 3, 1, 1, 0, 1, None, None, 0),
        TurnRequest(name, 1, 0, 1, "turn", "digest", *turn),
        Progress(name, 1, 1, 0, 1, 0, RESPONSE, (VersionSpan(VERSION, len(RESPONSE.token_ids)),), None, 0, 0),
        TurnEnded(name, 1, 0, 1, "turn", 0, len(RESPONSE.token_ids), "stop", None, 0),
    ]


def test_gateway_and_agents_fold_episodes_with_an_invalid_record(tmp_path: Path) -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    read_response = partial(response_message, ConversationFormat(words, plain=True))
    table = EpisodeTable(2, read_response, lambda names: None)
    agents = RunAgents(AgentsConfig(), shard_of("agents"), tmp_path, tmp_path / "secret", 2, 0)
    changes = [(at, each) for at in range(4) for each in variants(episode(0)[at]) if is_decodable(each)]
    changes.append((2, replace(episode(0)[2], gained=replace(RESPONSE, token_ids=token_ids([4, -1, 2])))))
    letters = 0
    with closing(agents.restore(Restored("agents", 1, (), {}, {}))) as played:
        for number, (at, changed) in enumerate(changes, 1):
            records = episode(number)
            if at == 0 and changed.prompt.number == 0:
                changed = replace(changed, prompt=replace(changed.prompt, number=number))
            elif at and changed.trajectory_id == "p0.3":
                changed = replace(changed, trajectory_id=f"p{number}.3")
            records[at] = changed
            received = tuple(ReceivedRecord("inbox", 0, 4 * number + n, each) for n, each in enumerate(records))
            polled, invalid = reject_invalid(Polled("", 1, received, (), {}, True), ManifestOrder(), 0)
            table.fold(polled.records)
            played.fold(polled)
            letters += len(invalid)
    complete = [name for name in table.names() if table.segments(name, "tree", 1000).segments]
    assert (len(changes) > 250, letters > 100, len(complete) > 100) == (True, True, True)
