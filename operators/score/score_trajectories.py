"""ScoreTrajectories: writes exactly one experience for every finished trajectory, and counts errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from infra.clocks import wall_ms
from infra.runners.step_metrics import phase
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from operators.io.ledger import TrajectoryLedger
from operators.score.config import ScoreConfig
from operators.score.error_counts import ScoreCounters
from operators.score.scorer import Scorer
from operators.score.scoring import score_trajectories
from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey, group_id, is_trajectory_id, parse_trajectory_id
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
        metric = self._counts.metric(self._now(), alone=not outputs, last=polled.last)
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
