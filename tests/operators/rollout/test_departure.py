"""A rollout process that was given notice: it drains, waits until its work has left, and then stops."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import MagicMock

from test_generate_trajectories import Rollout

from operators.io.elements import Polled
from operators.rollout.departure import RESERVE_S, SETTLE_S
from operators.rollout.generate_trajectories import RolloutFold
from schemas.records import Progress, Release
from schemas.topics import INBOX, PROGRESS

NOTICE_S = 30.0


@dataclass
class Notice:
    """The notice of a process under test."""

    given_at: float | None = None
    ended: bool = False

    def end(self) -> None:
        self.ended = True


class Leaving(Rollout):
    """A rollout process that may be given notice."""

    def __init__(self, steps: int = 10**6) -> None:
        self.notice = Notice()
        super().__init__(steps, termination_notice_s=NOTICE_S)

    def _restore(self, restored: object) -> RolloutFold:
        fold = super()._restore(restored)  # type: ignore[arg-type]
        assert isinstance(fold, RolloutFold)
        replicas = list(fold._replicas.values())
        return RolloutFold(self.config, replicas, self.beats, self.backend, lambda: self.now, notice=self.notice)  # type: ignore[arg-type]

    @property
    def states(self) -> set[str]:
        assert isinstance(self.shard.fold, RolloutFold)
        return {replica.state for replica in self.shard.fold._replicas.values()}

    def give(self) -> None:
        self.notice.given_at = self.now
        self.shard.run()


def test_process_drains_when_it_is_given_notice() -> None:
    leaving = Leaving()
    leaving.shard.run(2)
    assert leaving.states == {"running"}
    sent = leaving.beats.changes
    leaving.give()
    assert leaving.states == {"draining"}
    assert leaving.beats.changes == sent + 1
    assert not leaving.notice.ended


def test_idle_process_stops_after_the_settle_time() -> None:
    leaving = Leaving()
    leaving.give()
    leaving.now += SETTLE_S - 0.1
    leaving.shard.run()
    assert not leaving.notice.ended
    leaving.now += 0.1
    leaving.shard.run()
    assert leaving.notice.ended


def test_process_stops_once_no_leader_computes_with_its_stage() -> None:
    leaving = Leaving()
    assert isinstance(leaving.shard.fold, RolloutFold)
    (replica, *_) = leaving.shard.fold._replicas.values()
    replica.staging = staging = MagicMock(serving=True, draining=False)
    staging.advance.return_value = False
    leaving.give()
    assert staging.draining
    leaving.now += SETTLE_S
    leaving.shard.run()
    assert not leaving.notice.ended
    staging.serving = False
    leaving.shard.run()
    assert leaving.notice.ended


def test_process_stops_once_its_work_is_handed_over() -> None:
    leaving = Leaving()
    leaving.assign(1)
    leaving.shard.run(3)
    leaving.give()
    leaving.now += SETTLE_S
    leaving.shard.run()
    assert not leaving.notice.ended
    leaving.log.append(INBOX, Release("1-1", ("p1.0",), (7,), 0, 3, 2, 1), partition=2)
    leaving.shard.run(2)
    assert leaving.notice.ended
    assert [each.next_owner.lease for each in leaving.log.rows(PROGRESS) if each.next_owner] == [7]


def test_process_stops_within_the_notice_and_loses_no_token() -> None:
    leaving = Leaving()
    leaving.assign(1)
    leaving.shard.run(3)
    leaving.give()
    leaving.now += NOTICE_S - RESERVE_S - 0.1
    leaving.shard.run()
    assert not leaving.notice.ended
    leaving.now += 0.1
    leaving.shard.run()
    assert leaving.notice.ended
    assert leaving.shard.fold is not None
    published = [*leaving.log.rows(PROGRESS), *leaving.shard.fold.fold(Polled("", 1, (), (), {}, True, last=True))]
    made = sum(engine.generated_tokens for engine in leaving.engines)
    assert sum(len(each.gained.token_ids) for each in published if isinstance(each, Progress)) == made > 0
