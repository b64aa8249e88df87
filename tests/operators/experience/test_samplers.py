"""Samplers, evictions, writers and packing: pure functions of the groups and the batch context."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factories import experience, prompt, trajectory, version
from sampled_batches import read_members

from operators.experience.batch_context import BatchContext
from operators.experience.config import Component, ExperienceConfig
from operators.experience.evictions import Age, Capacity, Staleness
from operators.experience.groups import Group, Groups
from operators.experience.members import GroupMember
from operators.experience.pack_batches import deal, pack
from operators.experience.samplers import SAMPLERS, DynamicSampling, GroupComplete, Sampler
from operators.experience.writers import Bounded, Finished
from schemas.block import Block
from schemas.records import Conversation, MicroBatch, RewardComponent


def group(
    number: int,
    rewards: tuple[float, ...] = (0.0, 1.0),
    at: int = 0,
    expected: int = 0,
    **how: Any,
) -> Group:
    """A closed group whose record is at offset `at`, and which arrived at time `at` of the buffer's clock."""
    question = prompt(number, expected or len(rewards))
    rows = [
        experience(trajectory(question, member, **how), reward, components=_accuracy(reward))
        for member, reward in enumerate(rewards)
    ]
    members = read_members(Block.of(rows), number % 2, at)
    closed = Group(number, members, float(at))
    closed.close(100)
    return closed


def _accuracy(reward: float) -> tuple[RewardComponent, ...]:
    return (RewardComponent("accuracy", float(reward >= 1), 0.0),) if reward in (0, 1) else ()


def context(batch: int = 0, newest: int = 9, **changes: Any) -> BatchContext:
    fields = {"wanted": 4, "shares": 1, "seed": 0, "newest": version(newest), "now": 0.0, "held": 0}
    return BatchContext(batch=batch, **(fields | changes))


def numbers(sampler: Sampler, ready: list[Group], **how: Any) -> list[int]:
    return [each.number for each in sampler.order(ready, context(**how))]


def packed(members: list[GroupMember], ranks: int) -> list[MicroBatch]:
    """Batch 7 of `members` at staleness 0, in micro-batches of up to 100 tokens."""
    by_rank = pack(7, members, np.zeros(len(members), np.int64), 100, ranks)
    return [record for parts in by_rank for part in parts for record in part.records()]


READY = [group(number, at=number) for number in range(8)]


def test_fifo_and_newest_first_order_by_completion() -> None:
    assert numbers(SAMPLERS["fifo"](), READY) == list(range(8))
    assert numbers(SAMPLERS["newest_first"](), READY) == list(range(8))[::-1]


@pytest.mark.parametrize("name", ["staleness_weighted", "prioritised", "windowed"])
def test_sampler_draws_by_seed_batch_and_groups_alone(name: str) -> None:
    sampler = SAMPLERS[name]()
    first = numbers(sampler, READY)
    assert first == numbers(sampler, READY)
    assert len({tuple(numbers(sampler, READY, batch=batch)) for batch in range(9)}) > 5
    assert first != numbers(sampler, READY, seed=1)
    without = [each for each in READY if each.number != 3]
    assert numbers(sampler, without) == [number for number in first if number != 3]


@pytest.mark.parametrize(
    ("name", "likely", "unlikely"),
    [
        ("staleness_weighted", group(1, under=version(9)), group(2, under=version(6))),
        ("prioritised", group(1, (0.0, 1.0)), group(2, (1.0, 1.0))),
    ],
)
def test_sampler_draws_heavier_groups_more_often(name: str, likely: Group, unlikely: Group) -> None:
    first = [numbers(SAMPLERS[name](), [unlikely, likely], batch=batch)[0] for batch in range(300)]
    assert first.count(1) > 240
    assert 2 in first


def test_windowed_takes_only_the_oldest_groups() -> None:
    assert sorted(numbers(SAMPLERS["windowed"](window=3), READY)) == [0, 1, 2]


def test_length_balanced_alternates_after_the_oldest_group() -> None:
    ready = [group(number, tokens=tokens) for number, tokens in enumerate([5, 1, 90, 2, 80, 3])]
    assert numbers(SAMPLERS["length_balanced"](window=6), ready) == [0, 2, 1, 4, 3, 5]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 1.0), None),
        ((0.0, 0.0), "no answer of the group is correct"),
        ((1.0, 1.0), "every answer of the group is correct"),
        ((0.3, 0.4), None),
        ((0.3, 0.3), "all rewards of the group are equal"),
    ],
)
def test_dynamic_sampling_keeps_groups_with_mixed_answers(rewards: tuple[float, ...], reason: str) -> None:
    assert DynamicSampling().refuse(group(0, rewards)) == reason


def test_dynamic_sampling_keeps_groups_of_unequal_conversations() -> None:
    conversations = (Conversation(0, 1, ""), Conversation(1, 1, ""))
    rows = [experience(trajectory(prompt(0, 2), at, conversations=conversations), 0.5) for at in range(2)]
    rows[0] = replace(rows[0], conversation_rewards=(0.0, 1.0))
    assert DynamicSampling().refuse(Group(0, read_members(Block.of(rows), 0, 0), 0.0)) is None


def test_group_complete_refuses_groups_with_missing_members() -> None:
    assert GroupComplete().refuse(group(0)) is None
    assert GroupComplete().refuse(group(0, expected=5)) == "the group lacks 3 of its 5 members"


@pytest.mark.parametrize(
    ("eviction", "how", "dropped"),
    [
        (Staleness(most=2), {"newest": 9}, [(0, "staleness 9 > 2"), (0, "staleness 9 > 2")]),
        (Age(seconds=5.0), {"now": 7.0}, [(0, "age 7 s > 5 s"), (0, "age 7 s > 5 s")]),
        (Capacity(trajectories=4), {"held": 6}, [(0, "more than 4 are held"), (0, "more than 4 are held")]),
        (Capacity(trajectories=6), {"held": 6}, []),
    ],
)
def test_evictions_return_members_with_reasons(eviction: Any, how: dict[str, Any], dropped: list[Any]) -> None:
    groups = [group(0, under=version(0)), group(1, at=4, under=version(9)), group(2, at=4, under=version(8))]
    assert [(drop.member.number, drop.reason) for drop in eviction.evict(groups, context(**how))] == dropped


def test_writers_refuse_with_reasons() -> None:
    (member,) = group(0, (1.0,), tokens=5, finish_reason="length").members
    assert Finished().refuse(member) == "cut off after 5 tokens"
    assert Bounded(tokens=7).refuse(member) == "8 tokens are more than 7"
    assert Bounded(tokens=8).refuse(member) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": Component("fifp")}, "sampler: there is none called 'fifp'; did you mean 'fifo'"),
        ({"sampler": Component("windowed", {"windo": 3})}, "windowed has no option 'windo'; did you mean 'window'"),
        ({"sampler": Component("windowed", {"window": 0})}, "window must be at least 1, not 0"),
        ({"sampler": Component("dynamic", {"order_by": "dynamic"})}, "must be a sampler that orders"),
        ({"evictions": (Component("capacity", {"trajectories": 0}),)}, "trajectories must be at least 1"),
        ({"writers": (Component("al"),)}, "writers: there is none called 'al'; did you mean 'all'"),
        ({"group_timeout_s": -1.0}, "group_timeout_s must be at least 0, not -1.0"),
    ],
)
def test_config_names_the_component_that_does_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExperienceConfig(**settings)


def test_config_loads_a_sampler_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom operators.experience.samplers import Sampler\n\n"
        "@dataclass(frozen=True)\nclass Longest(Sampler):\n    least: int = 0\n"
        "    def order(self, ready, context):\n        return sorted(ready, key=lambda group: -group.tokens)\n"
        "class NoSampler:\n    pass\n"
    )
    config = ExperienceConfig(sampler=Component(f"{tmp_path}/mine.py:Longest", {"least": 3}))
    ready = [group(number, tokens=tokens) for number, tokens in enumerate([5, 9, 2])]
    assert numbers(config.make_sampler(), ready) == [1, 0, 2]
    with pytest.raises(ValueError, match="must be a class that derives from"):
        ExperienceConfig(sampler=Component(f"{tmp_path}/mine.py:NoSampler")).make_sampler()


def test_groups_order_ready_ones_by_the_log() -> None:
    orders = set()
    for seed in range(5):
        groups = Groups()
        shuffled = [group(number, at=number // 2) for number in range(8)]
        random.Random(seed).shuffle(shuffled)
        for each in shuffled:
            groups.make_ready(each)
        orders.add(tuple(each.number for each in groups.ready))
    assert orders == {tuple(range(8))}


def test_pack_balances_micro_batches_and_tokens_over_ranks() -> None:
    rng = random.Random(0)
    members = [m for number in range(24) for m in group(number, tokens=rng.randint(1, 60)).members]
    parts = packed(members, 3)
    assert {(part.rank, part.count) for part in parts} == {(rank, parts[0].count) for rank in range(3)}
    assert all([p.index for p in parts if p.rank == rank] == list(range(parts[0].count)) for rank in range(3))
    tokens = [sum(len(part.token_ids) for part in parts if part.rank == rank) for rank in range(3)]
    assert max(tokens) - min(tokens) <= max(2 * member.length for member in members)
    by_group: dict[str, set[int]] = {}
    for part in parts:
        for name in part.trajectory_ids:
            by_group.setdefault(name.partition(".")[0], set()).add(part.rank)
    assert all(len(ranks) == 1 for ranks in by_group.values())
    assert sum(len(part.trajectory_ids) for part in parts) == len(members)


def test_pack_gives_empty_micro_batches_to_a_rank_without_work() -> None:
    (part, padding) = packed(group(0).members, 2)
    assert (part.rank, padding.rank, part.count, padding.count) == (0, 1, 1, 1)
    assert (len(padding.token_ids), padding.trajectory_ids, len(padding.lengths)) == (0, (), 0)


@pytest.mark.parametrize(
    ("loads", "shares", "expected"),
    [
        ([], 2, []),
        ([5, 4, 3], 1, [0, 0, 0]),
        ([1, 9, 4, 5], 2, [1, 0, 0, 1]),
        ([3, 3, 3], 4, [0, 1, 2]),
        ([9, 1, 1, 1, 1], 2, [0, 1, 1, 0, 1]),
    ],
)
def test_deal_assigns_equally_many_loads_to_each_share(loads: list[int], shares: int, expected: list[int]) -> None:
    assert deal(loads, shares) == expected
