"""Bytes that an optimizer step writes to Kafka, by topic: of records of the mean length, encoded as a run encodes them.

Each trajectory has a record of its own here; a run writes those that end together as rows of one. So the bytes of a
topic are an upper bound. A response carries four bytes of text a token. Topics that do not grow with trajectories,
batches, versions or metrics are left out, as the commit notes of `restore`; so is held-out evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schemas import topics
from schemas.codec import encode
from schemas.columns import flags, floats, integers, token_ids
from schemas.records import (
    Assignment,
    Experience,
    MicroBatch,
    PolicyVersion,
    Progress,
    Prompt,
    Response,
    RewardComponent,
    Sampling,
    Settled,
    TensorSpec,
    Trajectory,
    VersionSpan,
    WeightVersion,
)

TEXT_BYTES = 4
"""Of a token's text."""
TENSORS = 770
"""As many as a model of 32B parameters has."""
METRICS_BYTES = 240
"""A second and a rollout process (docs/topics.md)."""
SETTLED_ROWS = 256
"""Endings that share a record."""
_VERSION = PolicyVersion(1, 1000)
_NOW = 1_700_000_000_000


@dataclass(frozen=True)
class StepShape:
    """The trajectories of one optimizer step, and their tokens on average."""

    trajectories: int
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    progress_tokens: int
    rollouts: int
    seconds: float
    chunks: int = 0
    """Of a weight version; 0 leaves them out."""


def log_bytes(step: StepShape) -> Mapping[str, float]:
    """Bytes of values and headers by topic; one copy, not compressed."""
    tokens = step.response_tokens
    prompt, span = _prompt(step), (VersionSpan(_VERSION, tokens),)
    place = (1, 1, 0, 1)  # lease, attempt, replica and its incarnation
    trajectory = Trajectory(
        *(prompt, 0, *place, _response(tokens), "x" * TEXT_BYTES * tokens, span, _VERSION, "stop", None),
        *(_NOW, _NOW, _NOW),
    )
    name = trajectory.trajectory_id
    settled = Settled(name, step.samples_per_prompt, "batched", "", 1000, 1, tokens, _NOW)
    parts, rest = divmod(tokens, step.progress_tokens)
    pieces = [step.progress_tokens] * parts + [rest] * bool(rest)
    each = {
        topics.INBOX: _bytes(Assignment(prompt, 0, *place, None, None, _NOW)),
        topics.PROGRESS: sum(_bytes(Progress(name, *place, 0, _response(n), span, None, _NOW, _NOW)) for n in pieces),
        topics.TRAJECTORIES: _bytes(trajectory),
        topics.EXPERIENCES: _bytes(Experience(trajectory, 1.0, (RewardComponent("exact", 1.0, 1.0),), None, _NOW)),
        topics.SETTLED: _bytes(*[settled] * SETTLED_ROWS) / SETTLED_ROWS,
    }
    found = {topics.PROMPTS: step.trajectories / step.samples_per_prompt * _bytes(prompt)}
    found |= {topic: step.trajectories * size for topic, size in each.items()}
    found[topics.BATCHES] = _batch_bytes(step)
    found[topics.RELAY] = _bytes(_version(step))
    found[topics.METRICS] = METRICS_BYTES * step.rollouts * step.seconds
    return {topic.short_name: size for topic, size in found.items()}


def _bytes(*rows: object) -> int:
    value, headers = encode(*rows)
    return len(value) + sum(len(name) + len(content) for name, content in headers)


def _prompt(step: StepShape) -> Prompt:
    tokens = step.prompt_tokens
    sampling = Sampling(1.0, 1.0, 0, step.response_tokens, (2,), 0)
    text = "x" * TEXT_BYTES * tokens
    return Prompt(1000, "train", "task", text, token_ids([1] * tokens), "{}", step.samples_per_prompt, sampling)


def _response(tokens: int) -> Response:
    return Response(token_ids([1] * tokens), floats([-1.0] * tokens), flags([True] * tokens))


def _batch_bytes(step: StepShape) -> float:
    """Bytes of all micro-batches: a full one, as often as the step fills it."""
    length = step.prompt_tokens + step.response_tokens
    rows = max(1, step.micro_batch_tokens // length)
    zeros, ones, tokens = integers([0] * rows), floats([1.0] * rows), rows * length
    full = MicroBatch(
        *(1000, 0, 1, 0, token_ids([1] * tokens), floats([-1.0] * tokens), flags([True] * tokens)),
        lengths=integers([length] * rows),
        prompt_lengths=integers([step.prompt_tokens] * rows),
        rewards=ones,
        temperatures=ones,
        truncated=flags([False] * rows),
        trajectory_ids=tuple(f"p{1000 + row}.0" for row in range(rows)),
        version_epochs=zeros,
        version_numbers=zeros,
        staleness=zeros,
        lineage_partitions=zeros,
        lineage_offsets=zeros,
        breaks=integers([]),
        context_rewards=floats([]),
    )
    return step.trajectories / rows * _bytes(full)


def _version(step: StepShape) -> WeightVersion:
    spec = TensorSpec("model.layers.10.self_attn.q_proj.weight", "BF16", (5120, 5120))
    return WeightVersion(
        *(_VERSION, PolicyVersion(1, 999), 1000, "1.1000.safetensors", 10**9, "ab" * 32, (spec,) * TENSORS),
        *((1000,), (1000,), 10**6, False, _NOW),
        chunk_bytes=1,
        chunk_checksums=(4_294_967_295,) * step.chunks,
    )
