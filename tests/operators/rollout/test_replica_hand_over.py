"""A replica tells what it has gained, keeps room when asked, hands over as it is told, and resumes what it gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from record_factories import prompt, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from infra.transport.kv_transfer import KVTransfers
from infra.transport.relay_node import Endpoint
from operators.rollout.config import RolloutConfig
from operators.rollout.replica import Replica
from schemas.records import (
    Assignment,
    AssignmentRejected,
    NextOwner,
    PolicyVersion,
    Progress,
    Release,
    Reserve,
    Trajectory,
    VersionSpan,
)


def assignment(name: int = 0, lease: int = 1, under: PolicyVersion | None = None, **changes: Any) -> Assignment:
    return replace(Assignment(prompt(name, 1), 0, lease, 1, 0, 7, under, None, 0), **changes)


class Rig:
    """A replica whose trajectories take 12 steps, with weights 0, 1, … up to `held`."""

    def __init__(self, held: int = 1, index: int = 0, incarnation: int = 7, **options: Any) -> None:
        self.now = 0.0
        self.engine = ScriptedEngine(steps=lambda name: 12)
        self.weights = ScriptedWeights()
        settings = {"progress_tokens": 4, "progress_s": 100.0, "reserve_s": 10.0}
        interrupts, kv_transfers = options.pop("interrupts", False), options.pop("kv_transfers", None)
        config = RolloutConfig(**(settings | options))
        self.replica = Replica(
            index,
            incarnation,
            self.engine,
            self.weights,
            str,
            lambda: 42,
            config,
            interrupts=interrupts,
            kv_transfers=kv_transfers,
            clock=lambda: self.now,
        )
        for number in range(held):
            self.publish(number)
        self.replica.step()

    def publish(self, number: int) -> None:
        self.weights.add(version(number))
        self.replica.announce(version(number))

    def steps(self, count: int) -> list:
        return [word for _ in range(count) for word in self.replica.step()]


def told(words: list, name: str = "p0.0") -> list[tuple[int, list[int]]]:
    """Start and tokens of each Progress."""
    return [
        (word.start, word.gained.token_ids.to_pylist())
        for word in words
        if isinstance(word, Progress) and word.trajectory_id == name
    ]


def release(*leases: tuple[str, int]) -> Release:
    return Release("1-1.1", tuple(n for n, _ in leases), tuple(lease for _, lease in leases), 1, 9, 0, 7)


def reserve(*names: str, under: int = 0, kv: int = 10, plan: str = "1-1.0") -> Reserve:
    return Reserve(plan, version(under), names, kv, 0, 7)


# -- telling ----------------------------------------------------------------------------------------------------------


def test_each_token_is_told_once_and_in_order() -> None:
    rig = Rig()
    rig.replica.accept(assignment())
    words = rig.steps(12)
    assert told(words) == [(0, [0] * 4), (4, [0] * 4)]  # what comes at the end is in the trajectory
    assert [w.version_spans for w in words if isinstance(w, Progress)] == [(VersionSpan(version(0), 4),)] * 2
    assert isinstance(words[-1], Trajectory)
    assert len(words[-1].response.token_ids) == 12


def test_what_gains_little_is_told_after_a_while() -> None:
    rig = Rig(progress_tokens=1000, progress_s=8.0)
    rig.replica.accept(assignment())
    words = []
    for _ in range(10):
        rig.now += 1.0
        words += rig.steps(1)
    assert told(words) == [(0, [0] * 9)]


def test_short_answers_cost_nothing() -> None:
    rig = Rig(progress_tokens=13)
    rig.replica.accept(assignment())
    assert [type(word) for word in rig.steps(20)] == [Trajectory]


# -- handing over -----------------------------------------------------------------------------------------------------


def test_what_it_hands_over_it_stops_and_its_next_owner_completes() -> None:
    source, destination = Rig(), Rig(index=1, incarnation=9)
    source.replica.accept(assignment())
    assert told(source.steps(6)) == [(0, [0] * 4)]
    last, given = source.replica.hand_over(release(("p0.0", 5)))
    assert isinstance(last, Progress)
    assert (last.lease, last.start, last.next_owner) == (1, 4, NextOwner(5, 1, 9))
    assert last.gained.token_ids.to_pylist() == [0, 0]
    assert isinstance(given, Assignment)
    assert (given.lease, given.replica, given.incarnation, given.policy_version) == (5, 1, 9, version(0))
    assert given.partial is not None
    assert given.partial.token_ids.to_pylist() == [0] * 6
    assert not source.replica.busy()
    source.publish(1)
    news = source.replica.changes
    assert source.steps(20) == []
    assert (source.engine.version, source.replica.changes) == (version(1), news + 1)  # it is free for newer weights
    destination.replica.accept(given)
    words = destination.steps(6)
    assert told(words) == [(6, [0] * 4)]
    (done,) = [word for word in words if isinstance(word, Trajectory)]
    assert (done.lease, done.replica, len(done.response.token_ids)) == (5, 1, 12)
    assert last.first_token_at == done.first_token_at == 42
    assert done.version_spans == (VersionSpan(version(0), 12),)


@pytest.fixture
def post() -> Iterator[list[KVTransfers]]:
    """What two processes exchange KV by."""
    both = [KVTransfers("run", Endpoint(), 1_000_000) for _ in range(2)]
    yield both
    for each in both:
        each.close()


def handed_over(post: list[KVTransfers]) -> tuple[Rig, Rig, Assignment]:
    """A trajectory of 6 tokens on its way."""
    source, destination = Rig(kv_transfers=post[0]), Rig(index=1, incarnation=9, held=2, kv_transfers=post[1])
    source.replica.accept(assignment())
    source.steps(6)
    _, given = source.replica.hand_over(release(("p0.0", 5)))
    assert isinstance(given, Assignment)
    return source, destination, given


def ended(rig: Rig) -> Trajectory:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for word in rig.steps(1):
            if isinstance(word, Trajectory):
                return word
        time.sleep(0.01)
    raise AssertionError("it does not end")


def test_kv_comes_along_and_what_it_waits_for_stops_nobody(post: list[KVTransfers], monkeypatch: Any) -> None:
    _, destination, given = handed_over(post)
    coming: Future[memoryview] = Future()
    monkeypatch.setattr(post[1], "fetch", lambda parcel: coming)
    destination.replica.accept(given)
    destination.replica.accept(assignment(1, under=version(0), replica=1, incarnation=9))
    (done,) = [word for word in destination.steps(14) if isinstance(word, Trajectory)]
    assert done.trajectory_id == "p1.0"
    monkeypatch.undo()
    assert given.kv is not None
    coming.set_result(post[1].fetch(given.kv).result(10))
    assert len(ended(destination).response.token_ids) == 12
    assert destination.engine.given == {"p0.0": b"KV of p0.0"}
    assert (destination.replica.kv_reused, destination.replica.kv_recomputed) == (1, 0)


@pytest.mark.parametrize("trouble", ["dead", "gone", "damaged", "other weights", "no room", "none wanted"])
def test_without_its_kv_it_goes_on_all_the_same(post: list[KVTransfers], trouble: str) -> None:
    _, destination, given = handed_over(post)
    assert given.kv is not None
    match trouble:
        case "dead":
            post[0].close()
        case "gone":
            post[0].fetch(given.kv)
        case "damaged":
            given = replace(given, kv=replace(given.kv, chunk_checksums=(1,)))
        case "other weights":
            given = replace(given, kv=replace(given.kv, policy_version=version(1)))
        case "no room":
            given = replace(given, kv=replace(given.kv, bytes=1 << 40))
        case "none wanted":
            destination = Rig(index=1, incarnation=9)
    destination.replica.accept(given)
    assert len(ended(destination).response.token_ids) == 12
    assert destination.engine.given == {}
    assert (destination.replica.kv_reused, destination.replica.kv_recomputed) == (0, 1)


def test_kv_of_what_is_cancelled_before_it_starts_is_let_go(post: list[KVTransfers]) -> None:
    _, destination, given = handed_over(post)
    destination.replica.accept(given)
    destination.replica.cancel({"p0.0": 5})
    assert len(destination.replica._waiting.kv) == 0


@pytest.mark.parametrize("running", [True, False])
def test_only_who_has_an_old_lease_is_cancelled(running: bool) -> None:
    rig = Rig(held=2)
    rig.replica.accept(assignment(0, lease=5, under=version(1 if running else 0)))
    rig.steps(running)
    for lease in (0, 4):
        rig.replica.cancel({"p0.0": lease})
        assert not rig.replica.idle
    rig.replica.cancel({"p0.0": 5})
    assert rig.replica.idle


def test_where_weights_interrupt_nothing_that_moves_is_bound_to_a_version() -> None:
    rig = Rig(interrupts=True)
    rig.replica.accept(assignment())
    rig.steps(2)
    _, given = rig.replica.hand_over(release(("p0.0", 5)))
    assert isinstance(given, Assignment)
    assert given.policy_version is None
    assert given.version_spans == (VersionSpan(version(0), 2),)


def test_what_has_not_begun_is_handed_over_as_it_came() -> None:
    rig = Rig(held=2)
    rig.replica.accept(assignment(0))
    rig.steps(1)
    rig.replica.accept(assignment(1, under=version(0)))
    rig.steps(1)
    last, given = rig.replica.hand_over(release(("p1.0", 5)))
    assert isinstance(last, Progress)
    assert len(last.gained.token_ids) == 0
    assert isinstance(given, Assignment)
    assert (given.lease, given.policy_version, given.partial) == (5, version(0), None)


def test_the_shortest_are_handed_over_first() -> None:
    rig = Rig()
    for name in (0, 1, 2):
        rig.replica.accept(assignment(name))
        rig.steps(2)
    rig.replica.accept(assignment(3, under=version(0)))
    words = rig.replica.hand_over(release(("p0.0", 5), ("p2.0", 6), ("p3.0", 7), ("p1.0", 8)))
    given = [word.trajectory_id for word in words if isinstance(word, Assignment)]
    assert given == ["p3.0", "p2.0", "p1.0", "p0.0"]


@pytest.mark.parametrize("order", [release(("p9.0", 5)), release(("p0.0", 1)), release(("p0.0", 0))])
def test_what_is_not_here_or_is_here_under_a_later_lease_stays(order: Release) -> None:
    rig = Rig()
    rig.replica.accept(assignment())
    rig.steps(1)
    assert rig.replica.hand_over(order) == []
    assert rig.replica.busy()


def test_what_no_inbox_takes_stays() -> None:
    rig = Rig()
    long = prompt(0, 1)
    long = replace(long, sampling=replace(long.sampling, max_new_tokens=10**6))
    rig.replica.accept(assignment(prompt=long))
    rig.steps(1)
    assert rig.replica.hand_over(release(("p0.0", 5))) == []


# -- keeping room -----------------------------------------------------------------------------------------------------


def test_kept_room_keeps_the_weights_too_until_what_is_to_come_has_come() -> None:
    rig = Rig()
    rig.replica.reserve(reserve("p0.0", "p1.0"))
    assert rig.replica.reserved == ("1-1.0",)
    rig.publish(1)
    rig.steps(2)
    assert rig.engine.version == version(0)
    rig.replica.accept(assignment(0, under=version(0)))
    rig.replica.cancel({"p1.0": 9})
    assert rig.replica.reserved == ()
    rig.steps(20)
    assert rig.engine.version == version(1)


def test_room_is_not_kept_for_ever() -> None:
    rig = Rig()
    rig.replica.reserve(reserve("p0.0"))
    rig.publish(1)
    rig.now += 10.1
    rig.steps(1)
    assert (rig.replica.reserved, rig.engine.version) == ((), version(1))


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (reserve("p0.0", under=1), "another version"),
        (reserve(*(f"p{n}.0" for n in range(1, 5))), "more than its slots"),
        (reserve("p1.0", kv=10**4), "more than its KV"),
    ],
)
def test_who_has_no_room_keeps_none(order: Reserve, why: str) -> None:
    rig = Rig()
    rig.replica.accept(assignment())
    rig.steps(1)
    news = rig.replica.changes
    rig.replica.reserve(order)
    assert (rig.replica.reserved, rig.replica.changes) == ((), news), why


def test_rooms_add_up() -> None:
    rig = Rig()
    rig.replica.reserve(reserve("p0.0", "p1.0", kv=600, plan="a"))
    rig.replica.reserve(reserve("p2.0", kv=500, plan="b"))
    rig.replica.reserve(reserve("p3.0", "p4.0", "p5.0", kv=1, plan="c"))
    assert rig.replica.reserved == ("a",)
    rig.replica.cancel({"p0.0": 9})
    rig.replica.reserve(reserve("p2.0", kv=500, plan="b"))
    assert rig.replica.reserved == ("a", "b")


# -- draining and interrupting ----------------------------------------------------------------------------------------


def test_a_draining_replica_says_so_and_keeps_no_room() -> None:
    rig = Rig()
    news = rig.replica.changes
    rig.replica.drain()
    assert (rig.replica.state, rig.replica.changes) == ("draining", news + 1)
    rig.replica.reserve(reserve("p0.0"))
    assert rig.replica.reserved == ()
    rig.replica.accept(assignment())
    assert isinstance(rig.steps(12)[-1], Trajectory)  # what it has it finishes


def test_newer_weights_interrupt_where_they_may_and_each_token_names_its_own() -> None:
    rig = Rig(interrupts=True)
    rig.replica.accept(assignment())
    words = rig.steps(3)
    rig.publish(1)
    words += rig.steps(4)
    rig.publish(2)
    words += rig.steps(5)
    done = words[-1]
    assert isinstance(done, Trajectory)
    spans = tuple(VersionSpan(version(number), length) for number, length in ((0, 3), (1, 4), (2, 5)))
    assert done.version_spans == spans
    assert done.response.token_ids.to_pylist() == [0] * 3 + [1] * 4 + [2] * 5
    first, second = [word for word in words if isinstance(word, Progress)]
    assert first.version_spans == (VersionSpan(version(0), 3), VersionSpan(version(1), 1))
    assert second.version_spans == (VersionSpan(version(1), 3), VersionSpan(version(2), 1))


def test_an_evaluation_is_never_interrupted() -> None:
    rig = Rig(interrupts=True)
    pinned = prompt(0, 1, purpose="evaluation", policy_version=version(0))
    rig.replica.accept(assignment(prompt=pinned, under=version(0)))
    rig.steps(3)
    rig.publish(1)
    (done,) = [word for word in rig.steps(10) if isinstance(word, Trajectory)]
    assert done.version_spans == (VersionSpan(version(0), 12),)


def test_training_whose_version_is_gone_may_begin_anew_and_an_evaluation_may_not() -> None:
    rig = Rig(held=2)
    rig.weights.remove(version(0))
    pinned = prompt(1, 1, purpose="evaluation", policy_version=version(0))
    rig.replica.accept(assignment(0, under=version(0)))
    rig.replica.accept(assignment(prompt=pinned, under=version(0)))
    refused = [word for word in rig.steps(2) if isinstance(word, AssignmentRejected)]
    assert [(word.trajectory_id, word.retry) for word in refused] == [("p0.0", True), ("e1.0", False)]
