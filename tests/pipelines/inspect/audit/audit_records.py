"""Minimal records for tests of the audit: only the fields that it reads are set."""

from __future__ import annotations

from schemas import records as r
from schemas.columns import flags, floats, integers, token_ids
from schemas.identity import Purpose, parse_trajectory_id

_EMPTY = token_ids([])


def prompt(purpose: Purpose, number: int, samples: int = 8) -> r.Prompt:
    sampling = r.Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, stop_token_ids=(), seed=0)
    return r.Prompt(
        number=number,
        purpose=purpose,
        task="chain_sum",
        text="",
        token_ids=token_ids([1]),
        reference="",
        samples=samples,
        sampling=sampling,
    )


def assignment(name: str) -> r.Assignment:
    purpose, number, member = parse_trajectory_id(name)
    return r.Assignment(
        prompt=prompt(purpose, number, max(8, member + 1)),
        member=member,
        lease=1,
        attempt=1,
        replica=0,
        incarnation=1,
        policy_version=None,
        partial=None,
        assigned_at=0,
    )


def trajectory(name: str) -> r.Trajectory:
    assigned = assignment(name)
    return r.Trajectory(
        prompt=assigned.prompt,
        member=assigned.member,
        lease=1,
        attempt=1,
        replica=0,
        incarnation=1,
        response=r.Response(_EMPTY, floats([]), flags([])),
        text="",
        version_spans=(),
        newest_version=None,
        finish_reason="stop",
        error=None,
        started_at=0,
        first_token_at=None,
        finished_at=0,
    )


def experience(name: str) -> r.Experience:
    return r.Experience(trajectory=trajectory(name), reward=1.0, components=(), error=None, scored_at=0)


def settled(name: str, outcome: r.Outcome = "batched", reason: str = "", batch: int | None = None) -> r.Settled:
    return r.Settled(
        trajectory_id=name,
        group_size=8,
        outcome=outcome,
        reason=reason,
        batch=batch,
        staleness=None,
        tokens=0,
        settled_at=0,
    )


def micro_batch(batch: int, *names: str) -> r.MicroBatch:
    counts = integers([0] * len(names))
    return r.MicroBatch(
        batch=batch,
        index=0,
        count=1,
        rank=0,
        token_ids=_EMPTY,
        logprobs=floats([]),
        loss_mask=flags([]),
        lengths=counts,
        prompt_lengths=counts,
        rewards=floats([0.0] * len(names)),
        temperatures=floats([1.0] * len(names)),
        truncated=flags([False] * len(names)),
        trajectory_ids=names,
        version_epochs=counts,
        version_numbers=counts,
        staleness=counts,
        lineage_partitions=counts,
        lineage_offsets=counts,
        breaks=integers([]),
        context_rewards=floats([]),
    )


def manifest(version: str, parent: str | None, *batches: int) -> r.WeightVersion:
    parsed = r.PolicyVersion.parse(version)
    return r.WeightVersion(
        version=parsed,
        parent=r.PolicyVersion.parse(parent) if parent else None,
        step=parsed.number,
        file="",
        bytes=0,
        blake3="",
        tensors=(),
        batches=batches,
        batch_offsets=(),
        trajectories_trained=0,
        final=False,
        created_at=0,
    )
