"""ScoreTrajectories: writes exactly one experience for every finished trajectory, and counts errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.runners.step_metrics import StepCounters, phase
from operators.io.clocks import wall_ms
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from operators.io.ledger import TrajectoryLedger
from operators.score.config import ScoreConfig
from operators.score.episode_counts import count_episodes
from operators.score.scorer import Scorer
from operators.score.scoring import score_trajectories
from operators.score.task_errors import TaskErrorCounts
from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey, group_id, is_trajectory_id, parse_trajectory_id
from schemas.records import Metric
from schemas.topics import EXPERIENCES, METRICS


@dataclass(frozen=True)
class ScoreTrajectories:
    """Scores the first Trajectory of each id and ignores later ones.

    `partitions` is the partition count of the topics keyed by group.
    """

    config: ScoreConfig
    partitions: int

    def restore(self, restored: Restored, now: Callable[[], int] = wall_ms) -> _Scoring:
        ledger = TrajectoryLedger(self.partitions, restored.state.get("scored"))
        for trajectory in (received.record.trajectory for received in restored.ledger):
            if is_trajectory_id(trajectory.trajectory_id):
                ledger.add(parse_trajectory_id(trajectory.trajectory_id), trajectory.prompt.samples, 0)
        counts = ScoreCounters(restored.group, restored.state.get("counts"), restored.shard, self.config.shards)
        return _Scoring(Scorer(self.config), ledger, counts, now)


def split_state(
    states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], shard: int, shards: int
) -> Mapping[str, Any]:
    """The state of `shard` of `shards` after a change of their number, from the `states` of all shards before it.

    The marks of scored groups go with their partitions. Counts stay with the shard's number, whose metric has them.
    """
    marks = {name: below for state in states for name, below in state.get("scored", {}).items()}
    kept = {name: below for name, below in marks.items() if int(name[1:]) % shards == shard}
    return {"scored": kept, "counts": own.get("counts", {})}


class _Scoring(ShardFold):
    def __init__(
        self,
        scorer: Scorer,
        scored: TrajectoryLedger,
        counts: ScoreCounters,
        now: Callable[[], int] = wall_ms,
    ) -> None:
        self._scorer, self._scored, self._counts, self._now = scorer, scored, counts, now
        self._emissions = 0

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        destinations: list[tuple[int, Purpose]] = []
        blocks: list[Block] = []
        with phase("admit trajectories"):
            for received in polled.records:
                for purpose, block in self._fresh(received.record):
                    destinations.append((received.partition, purpose))
                    blocks.append(block)
        outputs = self._score(destinations, blocks) if blocks else []
        metric = self._counts.metric(self._now())
        return outputs if metric is None else [*outputs, Output(METRICS, "score", metric)]

    def _score(self, destinations: Sequence[tuple[int, Purpose]], blocks: Sequence[Block]) -> list[Output]:
        """The experiences of `blocks`, merged by partition and purpose."""
        scored = score_trajectories(Block.concat(blocks), self._scorer, self._now())
        self._counts.add(scored)
        ends = accumulate(map(len, blocks))
        parts = [scored.slice(end - len(block), len(block)) for end, block in zip(ends, blocks, strict=True)]
        merged: dict[tuple[int, Purpose], list[Block]] = {}
        for destination, part in zip(destinations, parts, strict=True):
            merged.setdefault(destination, []).append(part)
        return [
            Output(EXPERIENCES, _first_group(purpose, group[0]), Block.concat(group), partition)
            for (partition, purpose), group in merged.items()
        ]

    def _fresh(self, block: Block) -> Iterator[tuple[Purpose, Block]]:
        """By purpose: the rows of `block` that have not been scored yet."""
        rows: dict[Purpose, list[int]] = {}
        names = ("prompt.purpose", "prompt.number", "member", "prompt.samples")
        columns = [block.column(name).to_pylist() for name in names]
        for row, (purpose, number, member, samples) in enumerate(zip(*columns, strict=True)):
            if self._scored.add(TrajectoryKey(purpose, number, member), samples, self._emissions):
                rows.setdefault(purpose, []).append(row)
        for purpose, fresh in rows.items():
            yield purpose, block if len(fresh) == len(block) else block.take(fresh)

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        state = {"scored": self._scored.state(), "counts": self._counts.state()}
        return Checkpoint(positions, self._scored.oldest_emission(), state)

    def close(self) -> None:
        self._scorer.close()


def _first_group(purpose: Purpose, experiences: Block) -> str:
    """The key of a record of `experiences`, all of one `purpose`: the id of the first group."""
    return group_id(purpose, experiences.column("trajectory.prompt.number")[0].as_py())


EVERY_MS = 1_000
"""The shortest time between two metrics."""
COUNTS = (
    "trajectories",
    "reward_errors",
    "episode_errors",
    "generation_errors",
    "heldout_trajectories",
    "heldout_errors",
)
"""Scored trajectories of training; those whose reward function failed, whose environment failed, whose generation
failed. Then those of evaluation, and those of them with any error: nothing is trained on them."""


class ScoreCounters:
    """The counts of `shard` since the start of the run, also by task and of episodes.

    `state` of the commit note continues them after a restart.
    """

    def __init__(self, group: str, state: Mapping[str, int] | None = None, shard: int = 0, shards: int = 1) -> None:
        known = state or {}
        self._shard = {"shard": float(shard)} if shards > 1 else {}
        self._counters = StepCounters(group, {name: known.get(name, 0) for name in COUNTS})
        self._by_task = TaskErrorCounts({name: count for name, count in known.items() if name not in COUNTS})
        self._published = self._scored()
        self._published_at = 0

    def add(self, experiences: Block) -> None:
        held_out = pc.equal(experiences.column("trajectory.prompt.purpose"), "evaluation")
        failed = pc.equal(experiences.column("trajectory.finish_reason"), "failed")
        in_episode = pc.not_equal(experiences.column("trajectory.prompt.environment"), "")
        errors = pc.is_valid(experiences.column("error"))
        for name, kind in (
            ("reward_errors", pc.and_not(errors, failed)),
            ("episode_errors", pc.and_(failed, in_episode)),
            ("generation_errors", pc.and_not(failed, in_episode)),
        ):
            self._counters.add(name, _true(pc.and_not(kind, held_out)))
        self._counters.add("trajectories", len(experiences) - _true(held_out))
        self._counters.add("heldout_trajectories", _true(held_out))
        self._counters.add("heldout_errors", _true(pc.and_(pc.or_(errors, failed), held_out)))
        trained = pc.invert(held_out)
        self._by_task.add(experiences, trained)
        count_episodes(self._by_task.values, experiences, trained)

    def metric(self, now: int) -> Metric | None:
        """The metric `score` at `now` (Unix milliseconds) if the counts are new and the last one is old enough."""
        scored = self._scored()
        if scored == self._published or 0 <= now - self._published_at < EVERY_MS:  # negative: the clock was set back
            return None
        self._published, self._published_at = scored, now
        counts = {name: float(count) for name, count in self.state().items()}
        return Metric("score", scored, counts | self._shard, now)

    def state(self) -> dict[str, int]:
        """The counts, JSON-ready."""
        return {**self._counters.totals, **self._by_task.values}

    def _scored(self) -> int:
        return self._counters.totals["trajectories"] + self._counters.totals["heldout_trajectories"]


def _true(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)
