"""ScoreTrajectories: every finished trajectory gets exactly one answer. Groups that come together travel together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.io.ledger import TrajectoryLedger
from operators.score.config import ScoreConfig
from operators.score.scorer import Scorer
from operators.score.scoring import score_trajectories
from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey, group_id, is_trajectory_id, parse_trajectory_id
from schemas.topics import EXPERIENCES


@dataclass(frozen=True)
class ScoreTrajectories:
    """Scores the first Trajectory of each id and passes over later ones. `partitions` of the topics keyed by group."""

    config: ScoreConfig
    partitions: int

    def restore(self, restored: Restored) -> _Scoring:
        ledger = TrajectoryLedger(self.partitions, restored.state.get("scored"))
        for trajectory in (received.record.trajectory for received in restored.ledger):
            if is_trajectory_id(trajectory.trajectory_id):
                ledger.add(parse_trajectory_id(trajectory.trajectory_id), trajectory.prompt.samples, 0)
        return _Scoring(Scorer(self.config), ledger)


class _Scoring:
    def __init__(
        self, scorer: Scorer, scored: TrajectoryLedger, now: Callable[[], int] = lambda: time.time_ns() // 10**6
    ) -> None:
        self._scorer, self._scored, self._now = scorer, scored, now
        self._emissions = 0

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        places: list[tuple[int, Purpose]] = []
        blocks: list[Block] = []
        for received in polled.records:
            for purpose, block in self._fresh(received.record):
                places.append((received.partition, purpose))
                blocks.append(block)
        if not blocks:
            return []
        scored = score_trajectories(Block.concatenated(blocks), self._scorer, self._now())
        ends = accumulate(map(len, blocks))
        parts = [scored.part(end - len(block), len(block)) for end, block in zip(ends, blocks, strict=True)]
        together: dict[tuple[int, Purpose], list[Block]] = {}
        for place, part in zip(places, parts, strict=True):
            together.setdefault(place, []).append(part)
        return [
            Output(EXPERIENCES, _first_group(purpose, mine[0]), Block.concatenated(mine), partition)
            for (partition, purpose), mine in together.items()
        ]

    def _fresh(self, block: Block) -> Iterator[tuple[Purpose, Block]]:
        """What of `block` has not been scored yet, by purpose."""
        rows: dict[Purpose, list[int]] = {}
        names = ("prompt.purpose", "prompt.number", "member", "prompt.samples")
        columns = [block.column(name).to_pylist() for name in names]
        for row, (purpose, number, member, samples) in enumerate(zip(*columns, strict=True)):
            if self._scored.add(TrajectoryKey(purpose, number, member), samples, self._emissions):
                rows.setdefault(purpose, []).append(row)
        for purpose, mine in rows.items():
            yield purpose, block if len(mine) == len(block) else block.take(mine)

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(positions, self._scored.oldest_emission(), {"scored": self._scored.state()})

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._scorer.close()


def _first_group(purpose: Purpose, experiences: Block) -> str:
    """The key of a record of `experiences`: all are of one purpose, which its first letter says."""
    return group_id(purpose, experiences.column("trajectory.prompt.number")[0].as_py())
