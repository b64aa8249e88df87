"""Joining the parts of a batch, and rejecting invalid data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainer_batches import make_batch, save_tiny_model, with_floats

from operators.trainer.batch import concatenate, join_parts, reject_unknown_tokens
from operators.trainer.config import AlgorithmConfig, LearnerConfig
from operators.trainer.global_batch_metadata import gather_metadata
from operators.trainer.learner import Learner
from operators.trainer.metrics import TokenMetrics
from operators.trainer.ranks import ALONE
from schemas import columns
from schemas.records import MicroBatch, PolicyVersion


def test_join_parts_orders_by_index() -> None:
    parts = make_batch(parts=3)
    batch = join_parts(parts[::-1])
    assert batch.trajectory_ids == tuple(name for part in parts for name in part.trajectory_ids)
    assert len(batch) == 16
    for index, start in enumerate(batch.starts):
        end = start + batch.lengths[index]
        assert batch.trained[index] == batch.loss_mask[start:end].sum()
        assert not batch.loss_mask[start : start + batch.prompt_lengths[index]].any()
    assert batch.token_ids.tolist() == [token for part in parts for token in part.token_ids.to_pylist()]
    assert set(batch.versions) == {PolicyVersion(0, 0), PolicyVersion(1, 0)}


def test_join_parts_keeps_groups_across_parts() -> None:
    batch = join_parts(make_batch(parts=3, number=2))
    prompts = [name.split(".")[0] for name in batch.trajectory_ids]
    for one, group in zip(prompts, batch.group_keys, strict=True):
        for other, other_group in zip(prompts, batch.group_keys, strict=True):
            assert (one == other) == (group == other_group)
    assert len(set(batch.group_keys)) == 4


def test_join_parts_names_a_nonfinite_trajectory() -> None:
    (row,) = make_batch()
    batch = join_parts([row])
    trained = int(np.flatnonzero(batch.loss_mask)[40])
    owner = int(np.searchsorted(np.cumsum(batch.lengths), trained, side="right"))
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match=rf"{batch.trajectory_ids[owner]} has a behaviour logprob"):
            join_parts([with_floats(row, "logprobs", {trained: value})])
        with pytest.raises(ValueError, match=rf"{batch.trajectory_ids[5]} \(and 1 more\) has a reward"):
            join_parts([with_floats(row, "rewards", {5: value, 7: value})])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_join_parts_rejects_an_invalid_temperature(temperature: float) -> None:
    (row,) = make_batch()
    with pytest.raises(ValueError, match=rf"{row.trajectory_ids[2]} was sampled at a temperature that is not positive"):
        join_parts([with_floats(row, "temperatures", {2: temperature})])


def test_join_parts_ignores_untrained_logprobs() -> None:
    (row,) = make_batch()
    untrained = int(np.flatnonzero(~join_parts([row]).loss_mask)[3])
    join_parts([with_floats(row, "logprobs", {untrained: float("nan")})])


def test_join_parts_rejects_parts_of_several_batches() -> None:
    first, second = make_batch(parts=2)
    for rows in ([first, first], [first, replace(second, batch=9)]):
        with pytest.raises(ValueError, match="not those of one batch"):
            join_parts(rows)
    with pytest.raises(ValueError, match="at least one"):
        join_parts([])


def test_join_parts_names_a_malformed_sequence() -> None:
    (row,) = make_batch()
    name = row.trajectory_ids[2]
    for length in (0, 1000):
        prompts = row.prompt_lengths.to_pylist()
        prompts[2] = length
        with pytest.raises(ValueError, match=rf"{name} has no prompt, or one longer"):
            join_parts([replace(row, prompt_lengths=columns.integers(prompts))])
    mask = row.loss_mask.to_pylist()
    mask[sum(row.lengths.to_pylist()[:2])] = True
    with pytest.raises(ValueError, match=rf"{name} has a prompt token in its loss mask"):
        join_parts([replace(row, loss_mask=columns.flags(mask))])
    with pytest.raises(ValueError, match=rf"{name} occurs more than once in the batch"):
        join_parts([replace(row, trajectory_ids=(*row.trajectory_ids[:3], name, *row.trajectory_ids[4:]))])
    with pytest.raises(ValueError, match="tokens by its lengths"):
        join_parts([replace(row, lengths=columns.integers([*row.lengths.to_pylist()[:-1], 1]))])


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        ([5, 5], "not rising positions"),
        ([-1], "not rising positions"),
        ([10**6], "not rising positions"),
        ([9], "not rising positions"),
        ([0], "begins with a break"),
    ],
)
def test_join_parts_rejects_invalid_breaks(breaks: list[int], reason: str) -> None:
    row = shortest(lengths=(5, 4))
    assert len(row.token_ids) == 9
    with pytest.raises(ValueError, match=reason):
        join_parts([replace(row, breaks=columns.integers(breaks))])


def shortest(lengths: tuple[int, ...]) -> MicroBatch:
    """Sequences of a prompt of one token, of which nothing is trained."""
    (row,), count = make_batch(), len(lengths)
    tokens = sum(lengths)
    return replace(
        row,
        token_ids=columns.token_ids([1] * tokens),
        logprobs=columns.floats([0.0] * tokens),
        loss_mask=columns.flags([False] * tokens),
        lengths=columns.integers(lengths),
        prompt_lengths=columns.integers([1] * count),
        rewards=columns.floats([0.0] * count),
        temperatures=columns.floats([1.0] * count),
        truncated=columns.flags([False] * count),
        trajectory_ids=tuple(f"p0.{sample}" for sample in range(count)),
        **{
            name: columns.integers([0] * count)
            for name in ("version_epochs", "version_numbers", "staleness", "lineage_partitions", "lineage_offsets")
        },
    )


def test_join_parts_takes_any_lengths_and_breaks_that_fit() -> None:
    alone = join_parts([shortest((4,))])
    assert alone.lengths.tolist() == [4]
    prompt = replace(shortest((4,)), prompt_lengths=columns.integers([4]))
    assert join_parts([prompt]).prompt_lengths.tolist() == [4]
    adjacent = join_parts([replace(shortest((5, 4)), breaks=columns.integers([2, 3]))])
    assert adjacent.context_lengths.tolist() == [2, 1, 2, 4]


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ((2, -1, 4), "p0.1 has a length below 0"),
        ((-1, 6, 0), r"p0.0 \(and 1 more\) has a length"),
        ((3, 2, 0), "p0.2 has no prompt"),
    ],
)
def test_join_parts_rejects_impossible_lengths(lengths: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        join_parts([replace(shortest((2, 1, 2)), lengths=columns.integers(lengths))])


def test_conversations_keep_their_places_in_later_parts() -> None:
    first = replace(two_conversations([1.0, 2.0, 3.0]), index=0)
    second = replace(two_conversations([4.0, 5.0, 6.0]), index=1, trajectory_ids=("p1.0", "p1.1"))
    batch = join_parts([first, second])
    assert batch.contexts.tolist() == [2, 1, 2, 1]
    assert batch.context_lengths.tolist() == [3, 3, 2, 3, 3, 2]
    assert batch.context_trained.tolist() == [2, 1, 1, 2, 1, 1]
    assert batch.context_rewards.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    of_all = join_parts([replace(each, context_rewards=columns.floats([])) for each in (first, second)])
    assert of_all.context_rewards.tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.0]
    plain = replace(shortest((2, 2)), trajectory_ids=("p2.0", "p2.1"))
    assert join_parts([plain, second]).context_rewards.tolist() == [0.0, 0.0, 4.0, 5.0, 6.0]


def test_batches_are_concatenated() -> None:
    one, other = (join_parts(make_batch(number=number)) for number in (0, 1))
    assert concatenate([one]) is one
    both = concatenate([one, other])
    assert both.trajectory_ids == (*one.trajectory_ids, *other.trajectory_ids)
    assert both.starts.tolist() == [*one.starts, *(other.starts + len(one.token_ids))]
    assert both.versions == (*one.versions, *other.versions)


def test_token_ids_of_the_whole_vocabulary_are_known() -> None:
    row = shortest((2, 2))
    batch = join_parts([replace(row, token_ids=columns.token_ids([0, 1, 2, 3]))])
    reject_unknown_tokens(batch, 4)
    with pytest.raises(ValueError, match=r"p0.1 has a token id outside the model's vocabulary of 3"):
        reject_unknown_tokens(batch, 3)


def test_join_parts_rejects_a_trained_first_token_of_a_context() -> None:
    (row,) = make_batch()
    trained = int(row.loss_mask.to_numpy(zero_copy_only=False).argmax())
    with pytest.raises(ValueError, match="trains the first token of a context"):
        join_parts([replace(row, breaks=columns.integers([trained]))])


@pytest.mark.parametrize(
    "column",
    [
        *("token_ids", "logprobs", "loss_mask", "lengths", "prompt_lengths", "rewards", "temperatures", "staleness"),
        *("version_epochs", "version_numbers"),
    ],
)
def test_join_parts_names_columns_of_wrong_length(column: str) -> None:
    (row,) = make_batch()
    with pytest.raises(ValueError, match=rf"but \d+ {column}|tokens by its lengths"):
        join_parts([replace(row, **{column: getattr(row, column)[:-1]})])


def two_conversations(rewards: list[float]) -> MicroBatch:
    """A group of two: the first has two conversations, of two and of one trained tokens, the second has one."""
    (row,) = make_batch()
    return replace(
        row,
        token_ids=columns.token_ids([1, 2, 3, 4, 5, 6, 1, 7]),
        logprobs=columns.floats([0.0, -1.0, -1.0, 0.0, -1.0, 0.0, 0.0, -1.0]),
        loss_mask=columns.flags([False, True, True, False, True, False, False, True]),
        lengths=columns.integers([6, 2]),
        prompt_lengths=columns.integers([1, 1]),
        rewards=columns.floats([0.5, 0.0]),
        temperatures=columns.floats([1.0, 1.0]),
        truncated=columns.flags([False, False]),
        trajectory_ids=("p0.0", "p0.1"),
        breaks=columns.integers([3]),
        context_rewards=columns.floats(rewards),
        **{
            name: columns.integers([0, 0])
            for name in ("version_epochs", "version_numbers", "staleness", "lineage_partitions", "lineage_offsets")
        },
    )


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.0, 0.0, 0.0], [0.75, 0.75, -0.25, -0.25]), ([], [0.25, 0.25, 0.25, -0.25])]
)
def test_update_trains_conversations_by_their_own_rewards(
    rewards: list[float], expected: list[float], tmp_path: Path
) -> None:
    learner = Learner(
        LearnerConfig(algorithm=AlgorithmConfig(name="dr_grpo", max_response_tokens=4)), save_tiny_model(tmp_path)
    )
    batch = join_parts([two_conversations(rewards)])
    metadata = gather_metadata(batch, ALONE)
    _, advantages, targets = learner._score_batch(batch, metadata, TokenMetrics(), trains_policy=True)
    assert advantages.tolist() == expected == targets.advantages.tolist()
    metrics = learner.update([two_conversations(rewards)])
    assert metrics["advantage/abs_mean"] == sum(map(abs, expected)) / 4
    assert metrics["reward/mean"] == 0.25


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 0.0], "has 3 contexts, but 2 context_rewards"),
        ([1.0, 0.0, 0.0, 0.0], "has 3 contexts, but 4 context_rewards"),
        ([0.0, float("nan"), 0.0], "p0.0 has a conversation's reward that is not finite"),
    ],
)
def test_join_parts_rejects_invalid_context_rewards(rewards: list[float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        join_parts([two_conversations(rewards)])
