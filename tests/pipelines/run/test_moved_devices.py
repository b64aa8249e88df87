"""Devices move between trainer and rollouts: what is given up ends before it is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from recorded_fleet import RecordedFleet

from pipelines.roles import Role, RoleProcess, processes_of_pipeline
from pipelines.run.elastic_split import STOP_S, TRAINER, ElasticSplit
from pipelines.run.local_scaling import ROLLOUT, follow_target


@dataclass
class Split:
    """A run with `devices` devices, one of them a rollout's at first."""

    devices: int
    fleet: RecordedFleet = field(default_factory=RecordedFleet)
    saved: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        others = (*processes_of_pipeline(ROLLOUT, 1), *processes_of_pipeline(TRAINER, self.devices - 1))
        for process in (RoleProcess("light", (Role("score"),)), *others):
            self.fleet.add(process)
        self.fleet.calls.clear()
        clock = lambda: self.now  # noqa: E731
        self.split = ElasticSplit(
            self.fleet,  # type: ignore[arg-type]
            self.devices,
            self.devices - 1,
            self.saved.append,
            self.notes.append,
            clock,
        )

    def tick(self, target: int, times: int = 2) -> list[str]:
        """What the fleet is asked for; the second time nothing new."""
        self.fleet.calls.clear()
        for _ in range(times):
            follow_target(self.fleet, self.split.follow(target), lambda line: None, 0.0)  # type: ignore[arg-type]
        return list(self.fleet.calls)


def test_ranks_end_before_rollouts_start() -> None:
    split = Split(4)
    assert split.tick(1) == []
    assert split.tick(3) == ["stop trainer", "stop trainer-1", "stop trainer-2"]
    split.fleet.end("trainer", "trainer-2")
    assert split.tick(3) == []
    split.fleet.end("trainer-1")
    assert split.tick(3) == ["add trainer", "add rollout-1", "add rollout-2"]
    assert (split.saved, split.split.ranks) == ([1], 1)
    assert split.notes == ["the trainer continues with 1 of 4 devices, 3 before"]
    assert [name for name in split.fleet.members if name.startswith("trainer")] == ["trainer"]


def test_rollouts_end_before_ranks_start() -> None:
    split = Split(3)
    split.tick(2)
    split.fleet.end("trainer", "trainer-1")
    split.tick(2)
    assert split.tick(1) == ["stop rollout-1"]
    assert split.tick(1) == []
    split.fleet.end("rollout-1")
    assert split.tick(1) == ["stop trainer"]
    split.fleet.end("trainer")
    assert split.tick(1) == ["add trainer", "add trainer-1"]
    assert split.saved == [1, 2]


def test_newest_target_counts_once_the_ranks_have_ended() -> None:
    split = Split(4)
    split.tick(3)
    split.fleet.end("trainer", "trainer-1", "trainer-2")
    assert split.tick(2) == ["add trainer", "add trainer-1", "add rollout-1"]


def test_ranks_that_were_stopped_in_vain_start_again() -> None:
    split = Split(3)
    split.tick(2)
    split.fleet.end("trainer", "trainer-1")
    assert split.tick(1) == ["add trainer", "add trainer-1"]
    assert (split.saved, split.notes) == ([2], [])


def test_rank_that_does_not_end_is_killed() -> None:
    split = Split(3)
    split.tick(2)
    split.fleet.end("trainer")
    split.now = STOP_S
    assert split.tick(2) == []
    split.now = STOP_S + 1
    assert split.tick(2) == ["kill trainer-1"]
    split.fleet.end("trainer-1")
    assert split.tick(2) == ["add trainer", "add rollout-1"]
