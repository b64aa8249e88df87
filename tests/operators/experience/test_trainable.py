"""Untrainable members are settled when they arrive; those that no rollout can have written are dead letters too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from buffer_harness import Buffer
from record_factories import SAMPLING, experience, failed, prompt, trajectory, version

from operators.experience.trainable import MAX_LENGTH
from schemas.block_codec import encode_block
from schemas.codec import MAX_VALUE_BYTES
from schemas.columns import flags, floats, token_ids
from schemas.records import Conversation, Episode, Experience, Response, VersionSpan
from schemas.topics import BATCHES, DEAD_LETTERS, SETTLED

_CUTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "infinite temperature": {"temperature": 1e39},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"top_k": 4},
}


_CONVERSATIONS: dict[str, tuple[list[int], list[bool]]] = {
    "conversations in disorder": ([0, 2, 2], [True, True, False, True]),
    "conversation beyond the end": ([0, 4], [True] * 4),
    "conversation with a trained begin": ([0, 2], [True] * 4),
}


_REWARDS: dict[str, tuple[float, ...]] = {
    "too few rewards": (1.0,),
    "too many rewards": (1.0, 0.0, 1.0),
    "large reward of a conversation": (1.0, 1e39),
}


def untrainable(kind: str, member: int = 0) -> Experience:
    """An experience that cannot be trained."""
    question = prompt(0, 3)
    if kind == "failed":
        return experience(failed(question, member, "out of memory"))
    if kind == "no version":
        return experience(trajectory(question, member, version_spans=()))
    if kind == "nothing was generated":
        return experience(trajectory(question, member, tokens=0))
    if kind in _CUTS:
        return experience(trajectory(prompt(0, 3, sampling=replace(SAMPLING, **_CUTS[kind])), member))
    if kind == "the prompt is empty":
        return experience(trajectory(prompt(0, 3, token_ids=token_ids([])), member))
    if kind == "large reward":
        return experience(trajectory(question, member), -1e39)
    if kind in _REWARDS:
        mask = flags([True, True, False, True])
        response = Response(token_ids([5] * 4), floats([-0.5] * 4), mask)
        conversations, spans = (Conversation(0, 1, ""), Conversation(2, 1, "")), (VersionSpan(version(0), 4),)
        made = trajectory(question, member, response=response, conversations=conversations, version_spans=spans)
        return experience(made, conversation_rewards=_REWARDS[kind])
    if kind == "unknown token in the prompt":
        return experience(trajectory(prompt(0, 3, token_ids=token_ids([7, 1])), member))
    if kind == "too long":
        return experience(
            trajectory(prompt(0, 3, token_ids=token_ids(np.ones(MAX_LENGTH, np.int32))), member, tokens=1)
        )
    if kind in _CONVERSATIONS:
        starts, mask = _CONVERSATIONS[kind]
        response = Response(token_ids([5] * 4), floats([-0.5] * 4), flags(mask))
        conversations = tuple(Conversation(start, 1, "") for start in starts)
        spans = (VersionSpan(version(0), 4),)
        made = trajectory(question, member, response=response, conversations=conversations, version_spans=spans)
        return experience(made)
    bad = {"unequal lengths": [-0.5], "not a number": [-0.5, float("nan")], "infinite": [-0.5, float("-inf")]}
    ids = {"negative token": [5, -1], "unknown token": [5, 6]}.get(kind, [5, 5])
    logprobs = bad.get(kind, [-0.5, 3.0] if kind == "a behaviour logprob is above 0" else [-0.5, -0.5])
    response = Response(token_ids(ids), floats(logprobs), flags([True, True]))
    return experience(trajectory(question, member, response=response))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("failed", "out of memory"),
        ("no version", "nothing was generated"),
        *((kind, kind) for kind in ("nothing was generated", "the prompt is empty")),
        ("negative token", "token -1 is not in the model's vocabulary"),
        ("unknown token", "token 6 is not in the model's vocabulary"),
        ("unknown token in the prompt", "token 7 is not in the model's vocabulary"),
        ("a behaviour logprob is above 0", "a behaviour logprob is above 0"),
        ("not a number", "a behaviour logprob is not finite"),
        ("infinite", "a behaviour logprob is not finite"),
        ("conversations in disorder", "its conversations begin at [0, 2, 2] of 4 tokens"),
        ("conversation beyond the end", "its conversations begin at [0, 4] of 4 tokens"),
        ("conversation with a trained begin", "the first token of a conversation is in the loss mask"),
        ("too few rewards", "2 conversations with 1 rewards"),
        ("too many rewards", "2 conversations with 3 rewards"),
        (
            "large reward of a conversation",
            "the rewards of its conversations, [1.0, 1e+39], are beyond single precision",
        ),
        ("too long", "1000001 tokens are more than the 1000000 that a micro-batch record holds"),
        ("unequal lengths", "2 tokens with 1 logprobs and a mask of 2"),
        ("greedy", "sampled at temperature 0: greedy answers have no probability to train"),
        ("infinite temperature", "sampled at a temperature beyond single precision"),
        ("large reward", "a reward of -1e+39 is beyond single precision"),
        ("top-p", "sampled with top_p 0.9 and top_k 0: the trainer's distribution is not truncated"),
        ("top-k", "sampled with top_p 1 and top_k 4: the trainer's distribution is not truncated"),
    ],
)
def test_untrainable_member_is_settled_and_its_group_completes(kind: str, reason: str) -> None:
    buffer = Buffer(global_batch=1, vocabulary=6)
    buffer.score(untrainable(kind))
    buffer.shard.run()
    (record,) = buffer.log.rows(SETTLED)
    assert (record.trajectory_id, record.outcome, record.reason, record.batch) == ("p0.0", "failed", reason, None)
    letters = [(r.step, r.reason, r.topic, r.offset) for r in buffer.log.rows(DEAD_LETTERS)]
    failed = kind in ("failed", "no version", "nothing was generated")
    assert letters == ([] if failed else [("make batches", f"p0.0: {reason}", "experiences", 0)])
    buffer.score(*(experience(trajectory(prompt(0, 3), member)) for member in (1, 2)))
    buffer.shard.run()
    assert buffer.batches() == [("p0.1", "p0.2")]


FAILURES = {  # by kind: the trajectory, and the reason why it is not trained
    "reward": (trajectory(prompt(0, 3), 0), "exact: raised"),
    "episode": (
        trajectory(
            prompt(0, 3, environment="guess"), 0, finish_reason="failed", error="raised", episode=Episode((), "failed")
        ),
        "raised",
    ),
    "episode without a turn": (
        failed(prompt(0, 3, environment="guess"), 0, "reset raised", episode=Episode((), "failed")),
        "reset raised",
    ),
    "generation": (trajectory(prompt(0, 3), 0, finish_reason="failed", error="out of memory"), "out of memory"),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("rewarded", [{}, {"": True}, {"": True, "chain_sum": False}, {"chain_sum": True}])
def test_failures_are_trained_only_with_a_reward_of_their_task(kind: str, rewarded: dict[str, bool]) -> None:
    buffer = Buffer(global_batch=2, rewards_failures=rewarded)
    made, reason = FAILURES[kind]
    buffer.score(experience(made, -1.0, error="exact: raised"))
    buffer.score(*(experience(trajectory(made.prompt, member)) for member in (1, 2)))
    buffer.shard.run()
    trained = rewarded.get("chain_sum", rewarded.get("", False)) and kind in ("reward", "episode")
    assert buffer.batches() == [(*(("p0.0",) if trained else ()), "p0.1", "p0.2")]
    reasons = {record.trajectory_id: (record.outcome, record.reason) for record in buffer.log.rows(SETTLED)}
    assert reasons["p0.0"] == (("batched", "") if trained else ("failed", reason))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("last", [True, False])
def test_only_member_left_by_failures_is_not_trained(restart: bool, last: bool) -> None:
    buffer = Buffer(global_batch=1)
    failures = [experience(failed(prompt(0, 3), member)) for member in (0, 1)]
    measured = [experience(trajectory(prompt(0, 3), 2))]
    first, second = (failures, measured) if last else (measured, failures)
    buffer.score(*first)
    buffer.shard.run()
    if restart:
        buffer.shard.start()
    buffer.score(*second)
    buffer.shard.run()
    assert buffer.batches() == []
    (dropped,) = [record for record in buffer.log.rows(SETTLED) if record.outcome != "failed"]
    assert (dropped.trajectory_id, dropped.outcome) == ("p0.2", "dropped")
    assert dropped.reason == "one of 3 members is left after failures: there is nothing to compare it with"


def test_environment_token_needs_no_logprob() -> None:
    buffer = Buffer(global_batch=1)
    response = Response(token_ids([5, 6]), floats([-0.5, float("nan")]), flags([True, False]))
    buffer.score(experience(trajectory(prompt(0, 1), 0, response=response)))
    buffer.shard.run()
    assert buffer.batches() == [("p0.0",)]


def test_longest_sequence_fits_a_record_with_any_budget() -> None:
    buffer = Buffer(global_batch=2, micro_batch_tokens=10)
    question = prompt(0, token_ids=token_ids(np.ones(MAX_LENGTH - 2, np.int32)))
    buffer.score(experience(trajectory(question, 0)), experience(trajectory(prompt(0), 1)))
    outputs = buffer.shard.run()
    parts = [output.record for output in outputs if output.topic is BATCHES]
    assert [part.column("lengths").to_pylist() for part in parts] == [[[MAX_LENGTH]], [[5]]]
    assert all(len(value) <= MAX_VALUE_BYTES for part in parts for value, _ in encode_block(part))
