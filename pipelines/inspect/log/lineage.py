"""The lineage of a weight version, from the log: manifests, batches, trajectories, prompts.

A manifest holds the trainer's offsets in the batches topic, so only the batches between two manifests are read. A batch
holds the offset of each of its trajectories in the experiences topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, partition_ranges
from pipelines.inspect.log.chunks import read_chunks
from schemas.block import Block
from schemas.identity import group_id, parse_trajectory_id
from schemas.records import Experience, MicroBatch, PolicyVersion, WeightVersion
from schemas.topics import BATCHES, EXPERIENCES


@dataclass
class TrainedPrompt:
    """A prompt, its trained samples, their rewards, and `place`: partition and offset of the first in experiences."""

    prompt: str
    trajectories: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    place: tuple[int, int] = (0, 0)
    task: str | None = None
    text: str | None = None


@dataclass
class VersionStep:
    """The training step from the parent of `manifest` to it: its batches and their content. Staleness in versions."""

    manifest: WeightVersion
    batches: list[int]
    tokens: int
    staleness: Counter[int]
    made_by: Counter[PolicyVersion]
    prompts: list[TrainedPrompt]

    @property
    def trajectories(self) -> int:
        return self.staleness.total()

    @property
    def missing(self) -> list[int]:
        """Batches that the manifest names but the log does not hold."""
        named = set(self.manifest.batches) - set(self.manifest.untrained_batches)
        return sorted(named - set(self.batches)) if self.manifest.parent else []

    @property
    def reward(self) -> float | None:
        """The mean reward of the trajectories."""
        rewards = [reward for prompt in self.prompts for reward in prompt.rewards]
        return sum(rewards) / len(rewards) if rewards else None


def read_step(client: ClientProperties, run: str, manifest: WeightVersion, parent: WeightVersion | None) -> VersionStep:
    """Read the training step from `parent` to `manifest` from the batches between them; empty without a parent.

    Raises UnknownTopic.
    """
    step = VersionStep(manifest, [], 0, Counter(), Counter(), [])
    if manifest.parent is None:
        return step
    name = BATCHES.name(run)
    ranges = batch_ranges(partition_ranges(client, name), manifest, parent)
    prompts: dict[str, TrainedPrompt] = {}
    trained = set(manifest.batches) - set(manifest.untrained_batches)
    for chunk in read_chunks(client, BATCHES, name, ranges):
        for block in chunk.decoded_records:
            if isinstance(block, Block) and block.column("batch")[0].as_py() in trained:
                _add_part(step, prompts, block.records()[0])
    step.prompts = list(prompts.values())
    return step


def batch_ranges(
    held: Mapping[int, PartitionRange], manifest: WeightVersion, parent: WeightVersion | None
) -> dict[int, PartitionRange]:
    """The ranges of the batches between `parent` and `manifest`; the ends of `held` if they have no offsets."""
    before = dict(enumerate(parent.batch_offsets)) if parent else {}
    after = dict(enumerate(manifest.batch_offsets))
    ranges = {}
    for number, whole in held.items():
        first = max(before.get(number, whole.beginning), whole.beginning)
        last = min(after.get(number, whole.end), whole.end)
        if first < last:
            ranges[number] = PartitionRange(first, last)
    return ranges


def _add_part(step: VersionStep, prompts: dict[str, TrainedPrompt], part: MicroBatch) -> None:
    if part.batch not in step.batches:
        step.batches.append(part.batch)
    step.tokens += len(part.token_ids)
    columns = (
        part.trajectory_ids,
        part.rewards.to_pylist(),
        part.staleness.to_pylist(),
        zip(part.version_epochs.to_pylist(), part.version_numbers.to_pylist(), strict=True),
        zip(part.lineage_partitions.to_pylist(), part.lineage_offsets.to_pylist(), strict=True),
    )
    for trajectory, reward, staleness, version, place in zip(*columns, strict=True):
        key = parse_trajectory_id(trajectory)
        prompt = group_id(key.purpose, key.number)
        held = prompts.setdefault(prompt, TrainedPrompt(prompt, place=place))
        held.trajectories.append(trajectory)
        held.rewards.append(reward)
        step.staleness[staleness] += 1
        step.made_by[PolicyVersion(*version)] += 1


def with_texts(client: ClientProperties, run: str, prompts: Iterable[TrainedPrompt]) -> None:
    """Fill in task and text of `prompts`, from the experiences at their places."""
    wanted: dict[int, dict[int, list[TrainedPrompt]]] = defaultdict(lambda: defaultdict(list))
    for prompt in prompts:
        partition, offset = prompt.place
        wanted[partition][offset].append(prompt)
    if not wanted:
        return
    ranges = {number: PartitionRange(min(places), max(places) + 1) for number, places in wanted.items()}
    for chunk in read_chunks(client, EXPERIENCES, EXPERIENCES.name(run), ranges):
        places = wanted[chunk.records.partition]
        for offset, block in zip(chunk.records.offsets, chunk.decoded_records, strict=True):
            if isinstance(block, Block) and offset in places:
                _fill_in(block, places[offset])


def _fill_in(block: Block, prompts: list[TrainedPrompt]) -> None:
    rows: list[Any] = [row.trajectory.prompt for row in block.records() if isinstance(row, Experience)]
    by_prompt = {prompt.prompt_id: prompt for prompt in rows}
    for held in prompts:
        if held.prompt in by_prompt:
            held.task, held.text = by_prompt[held.prompt].task, by_prompt[held.prompt].text
