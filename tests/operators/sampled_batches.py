"""Batches that an engine samples and the buffer packs, as the trainer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from record_factories import SAMPLING, experience, prompt, trajectory

from operators.experience.members import ExperienceBlock, GroupMember
from operators.experience.pack_batches import pack
from operators.rollout.engine import Completion, Engine, Request
from schemas.block import Block
from schemas.columns import flags, floats, token_ids
from schemas.records import MicroBatch, Response

SAMPLES = 4


def read_members(records: Block, partition: int, offset: int) -> list[GroupMember]:
    """The members in `records`, the experiences at `offset` of `partition`."""
    block = ExperienceBlock(records, partition, offset)
    return [GroupMember(block, row) for row in range(len(block))]


def sampled_batch(
    engine: Engine, temperatures: Sequence[float], *, vocabulary: int = 200, new_tokens: int = 12
) -> list[MicroBatch]:
    """A batch at staleness 0 with one group of `SAMPLES` responses per temperature; rewards alternate."""
    source = np.random.default_rng(0)
    prompts = [
        prompt(
            number,
            SAMPLES,
            token_ids=token_ids(source.integers(2, vocabulary, 5)),
            sampling=replace(SAMPLING, temperature=temperature, max_new_tokens=new_tokens, stop_token_ids=()),
        )
        for number, temperature in enumerate(temperatures)
    ]
    members = [trajectory(each, member) for each in prompts for member in range(SAMPLES)]
    for one in members:
        engine.submit(Request(one.trajectory_id, one.prompt.token_ids.to_numpy(), one.prompt.sampling))
    done: dict[str, Completion] = {}
    while len(done) < len(members):
        done |= {completion.trajectory_id: completion for completion in engine.step()}
    scored = [
        experience(replace(one, response=_response(done[one.trajectory_id])), float(number % 2))
        for number, one in enumerate(members)
    ]
    (parts,) = pack(0, read_members(Block.of(scored), 0, 0), np.zeros(len(scored), np.int64), budget=60, shares=1)
    return [record for part in parts for record in part.records()]


def _response(done: Completion) -> Response:
    generated = done.generated
    mask = flags([True] * len(generated.token_ids))
    return Response(token_ids(generated.token_ids), floats(generated.logprobs), mask)
