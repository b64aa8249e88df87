"""The finished trajectories of a run, for roles that follow episodes: exact after a restart, and small."""

from __future__ import annotations

from collections.abc import Mapping

from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.ledger import TrajectoryLedger
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import Trajectory
from schemas.topics import TRAJECTORIES, partition_of


class FinishedTrajectories:
    """Folds the topic `trajectories`, which has `partitions` partitions; `state` is that of the last commit.

    Groups of which all members have finished are a number in the commit's note. A restart reads the trajectories of
    the other groups again.
    """

    def __init__(self, partitions: int, state: Mapping[str, int] | None = None) -> None:
        self._partitions = partitions
        self._ledgers = [TrajectoryLedger(partitions, state) for _ in range(partitions)]
        """By partition, since offsets rise only within one."""

    def __contains__(self, name: str) -> bool:
        key = parse_trajectory_id(name)
        return key in self._ledgers[partition_of(key.number, self._partitions)]

    def add(self, received: ReceivedRecord, trajectory: Trajectory) -> None:
        """Record a finished trajectory."""
        prompt = trajectory.prompt
        ledger = self._ledgers[partition_of(prompt.number, self._partitions)]
        ledger.add(TrajectoryKey(prompt.purpose, prompt.number, trajectory.member), prompt.samples, received.offset)

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """`positions`, with those of trajectories from which a restart must read again."""
        found = dict(positions)
        for partition, ledger in enumerate(self._ledgers):
            place, oldest = PartitionKey(TRAJECTORIES.short_name, partition), ledger.oldest_emission()
            if oldest is not None and place in found:
                found[place] = min(found[place], oldest)
        return found

    def state(self) -> dict[str, int]:
        """The closed groups, for the commit's note."""
        merged: dict[str, int] = {}
        for ledger in self._ledgers:
            for name, below in ledger.state().items():
                merged[name] = max(below, merged.get(name, 0))
        return merged
