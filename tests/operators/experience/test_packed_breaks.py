"""PackMicroBatches: the breaks of responses with several conversations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from record_factories import experience, prompt, trajectory

from operators.experience.members import ExperienceBlock, GroupMember
from operators.experience.pack_batches import SelectedBatch, pack_batches
from schemas.block import Block
from schemas.records import Conversation


def test_micro_batch_has_the_breaks_of_its_conversations() -> None:
    conversations = (Conversation(0, 3, ""), Conversation(2, 1, ""), Conversation(5, 1, ""))
    several = trajectory(prompt(1, 2), 0, tokens=6, conversations=conversations)
    rows = [experience(trajectory(prompt(0, 1), 0)), experience(several), experience(trajectory(prompt(1, 2), 1))]
    rows = [rows[0], rows[1], rows[2], experience(replace(several, member=1))]
    block = ExperienceBlock(Block.of(rows), 0, 0)
    members = (*(GroupMember(block, row) for row in (1, 2)), GroupMember(block, 3))
    (output,) = pack_batches([SelectedBatch(7, members, np.zeros(3, np.int64))], 10**6, 1)
    part = output.record.records()[0]
    assert part.lengths.to_pylist() == [9, 5, 9]
    assert part.breaks.to_pylist() == [3 + 2, 3 + 5, 14 + 3 + 2, 14 + 3 + 5]
    assert part.context_rewards.to_pylist() == []


def test_micro_batch_has_the_rewards_of_its_conversations() -> None:
    conversations = (Conversation(0, 3, ""), Conversation(2, 1, ""), Conversation(5, 1, ""))
    several = trajectory(prompt(1, 3), 0, tokens=6, conversations=conversations)
    rows = [
        replace(experience(several, reward=1.0), conversation_rewards=(2.0, 1.0, 0.0)),
        experience(replace(several, member=1), reward=0.5),
        experience(trajectory(prompt(1, 3), 2), reward=0.25),
    ]
    block = ExperienceBlock(Block.of(rows), 0, 0)
    members = tuple(GroupMember(block, row) for row in range(3))
    (output,) = pack_batches([SelectedBatch(7, members, np.zeros(3, np.int64))], 10**6, 1)
    part = output.record.records()[0]
    assert part.context_rewards.to_pylist() == [2.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.25]
    assert part.rewards.to_pylist() == [1.0, 0.5, 0.25]
