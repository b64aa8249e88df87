"""A replica: progress, hand-over, reservations, draining and interrupts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from record_factories import prompt, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from infra.transport.endpoint import Endpoint
from infra.transport.kv_transfer import KVTransfers
from operators.io.repartition import Placed
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
    """A replica whose trajectories take 12 steps, with the weight versions 0 to `held` - 1."""

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
        return [event for _ in range(count) for event in self.replica.step()]


def reported(events: list, name: str = "p0.0") -> list[tuple[int, list[int]]]:
    """Start and tokens of each Progress record."""
    return [
        (event.start, event.gained.token_ids.to_pylist())
        for event in events
        if isinstance(event, Progress) and event.trajectory_id == name
    ]


def release(*leases: tuple[str, int]) -> Release:
    return Release("1-1.1", tuple(n for n, _ in leases), tuple(lease for _, lease in leases), 1, 9, 0, 7)


def reserve(*names: str, under: int = 0, kv: int = 10, plan: str = "1-1.0") -> Reserve:
    return Reserve(plan, version(under), names, kv, 0, 7)


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_reports_each_token_once() -> None:
    rig = Rig()
    rig.replica.accept(assignment())
    events = rig.steps(12)
    assert reported(events) == [(0, [0] * 4), (4, [0] * 4)]  # the last tokens are in the trajectory
    assert [w.version_spans for w in events if isinstance(w, Progress)] == [(VersionSpan(version(0), 4),)] * 2
    assert isinstance(events[-1], Trajectory)
    assert len(events[-1].response.token_ids) == 12


def test_progress_is_reported_after_progress_s() -> None:
    rig = Rig(progress_tokens=1000, progress_s=8.0)
    rig.replica.accept(assignment())
    events = []
    for _ in range(10):
        rig.now += 1.0
        events += rig.steps(1)
    assert reported(events) == [(0, [0] * 9)]


def test_short_trajectory_reports_no_progress() -> None:
    rig = Rig(progress_tokens=13)
    rig.replica.accept(assignment())
    assert [type(event) for event in rig.steps(20)] == [Trajectory]


# -- handing over -----------------------------------------------------------------------------------------------------


def test_handed_over_trajectory_completes_at_its_next_owner() -> None:
    source, destination = Rig(), Rig(index=1, incarnation=9)
    source.replica.accept(assignment())
    assert reported(source.steps(6)) == [(0, [0] * 4)]
    last, given = source.replica.hand_over(release(("p0.0", 5)))
    assert isinstance(last, Progress)
    assert (last.lease, last.start, last.next_owner) == (1, 4, NextOwner(5, 1, 9))
    assert last.gained.token_ids.to_pylist() == [0, 0]
    assert isinstance(given, Placed)
    order = given.assignment
    assert (order.lease, order.replica, order.incarnation, order.policy_version) == (5, 1, 9, version(0))
    assert order.partial is not None
    assert order.partial.token_ids.to_pylist() == [0] * 6
    assert not source.replica.busy()
    source.publish(1)
    news = source.replica.changes
    assert source.steps(20) == []
    assert (source.engine.version, source.replica.changes) == (version(1), news + 1)  # it can load newer weights
    destination.replica.accept(order)
    events = destination.steps(6)
    assert reported(events) == [(6, [0] * 4)]
    (done,) = [event for event in events if isinstance(event, Trajectory)]
    assert (done.lease, done.replica, len(done.response.token_ids)) == (5, 1, 12)
    assert last.first_token_at == done.first_token_at == 42
    assert done.version_spans == (VersionSpan(version(0), 12),)


@pytest.fixture
def transfers() -> Iterator[list[KVTransfers]]:
    """The KV transfers of two processes."""
    both = [KVTransfers("run", Endpoint(token="a-token-of-the-tests"), 1_000_000) for _ in range(2)]
    yield both
    for each in both:
        each.close()


def handed_over(transfers: list[KVTransfers]) -> tuple[Rig, Rig, Assignment]:
    """Hands over a trajectory of 6 tokens."""
    source, destination = Rig(kv_transfers=transfers[0]), Rig(index=1, incarnation=9, held=2, kv_transfers=transfers[1])
    source.replica.accept(assignment())
    source.steps(6)
    _, given = source.replica.hand_over(release(("p0.0", 5)))
    assert isinstance(given, Placed)
    return source, destination, given.assignment


def test_hand_over_without_kv_offers_none(transfers: list[KVTransfers]) -> None:
    rig = Rig(kv_transfers=transfers[0])
    rig.replica.accept(assignment())
    rig.steps(6)
    _, given = rig.replica.hand_over(replace(release(("p0.0", 5)), without_kv=True))
    assert isinstance(given, Placed)
    assert (given.assignment.kv, transfers[0].offers) == (None, 0)


def ended(rig: Rig) -> Trajectory:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for event in rig.steps(1):
            if isinstance(event, Trajectory):
                return event
        time.sleep(0.01)
    raise AssertionError("it does not end")


def test_pending_kv_delays_only_its_own_trajectory(transfers: list[KVTransfers], monkeypatch: Any) -> None:
    _, destination, given = handed_over(transfers)
    coming: Future[memoryview] = Future()
    monkeypatch.setattr(transfers[1], "fetch", lambda manifest: coming)
    destination.replica.accept(given)
    destination.replica.accept(assignment(1, under=version(0), replica=1, incarnation=9))
    (done,) = [event for event in destination.steps(14) if isinstance(event, Trajectory)]
    assert done.trajectory_id == "p1.0"
    monkeypatch.undo()
    assert given.kv is not None
    coming.set_result(transfers[1].fetch(given.kv).result(10))
    assert len(ended(destination).response.token_ids) == 12
    assert destination.engine.given == {"p0.0": b"KV of p0.0"}
    assert (destination.replica.kv.reused, destination.replica.kv.recomputed) == (1, 0)


@pytest.mark.parametrize("trouble", ["dead", "gone", "damaged", "other weights", "no room", "none wanted"])
def test_trajectory_resumes_without_its_kv(transfers: list[KVTransfers], trouble: str) -> None:
    _, destination, given = handed_over(transfers)
    assert given.kv is not None
    match trouble:
        case "dead":
            transfers[0].close()
        case "gone":
            transfers[0].fetch(given.kv)
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
    assert (destination.replica.kv.reused, destination.replica.kv.recomputed) == (0, 1)


def test_cancel_discards_the_kv_of_a_waiting_assignment(transfers: list[KVTransfers]) -> None:
    _, destination, given = handed_over(transfers)
    destination.replica.accept(given)
    destination.replica.cancel({"p0.0": 5})
    assert len(destination.replica._waiting.kv) == 0


@pytest.mark.parametrize("running", [True, False])
def test_cancel_ignores_later_leases(running: bool) -> None:
    rig = Rig(held=2)
    rig.replica.accept(assignment(0, lease=5, under=version(1 if running else 0)))
    rig.steps(running)
    for lease in (0, 4):
        rig.replica.cancel({"p0.0": lease})
        assert not rig.replica.idle
    rig.replica.cancel({"p0.0": 5})
    assert rig.replica.idle


def test_hand_over_pins_no_version_where_weights_interrupt() -> None:
    rig = Rig(interrupts=True)
    rig.replica.accept(assignment())
    rig.steps(2)
    _, given = rig.replica.hand_over(release(("p0.0", 5)))
    assert isinstance(given, Placed)
    assert given.assignment.policy_version is None
    assert given.assignment.version_spans == (VersionSpan(version(0), 2),)


def test_waiting_assignment_is_handed_over_unchanged() -> None:
    rig = Rig(held=2)
    rig.replica.accept(assignment(0))
    rig.steps(1)
    rig.replica.accept(assignment(1, under=version(0), at_least=version(0)))
    rig.steps(1)
    last, given = rig.replica.hand_over(release(("p1.0", 5)))
    assert isinstance(last, Progress)
    assert len(last.gained.token_ids) == 0
    assert isinstance(given, Placed)
    order = given.assignment
    assert (order.lease, order.policy_version, order.at_least, order.partial) == (5, version(0), version(0), None)


def test_hand_over_starts_with_the_shortest() -> None:
    rig = Rig()
    for name in (0, 1, 2):
        rig.replica.accept(assignment(name))
        rig.steps(2)
    rig.replica.accept(assignment(3, under=version(0)))
    events = rig.replica.hand_over(release(("p0.0", 5), ("p2.0", 6), ("p3.0", 7), ("p1.0", 8)))
    given = [event.assignment.trajectory_id for event in events if isinstance(event, Placed)]
    assert given == ["p3.0", "p2.0", "p1.0", "p0.0"]


@pytest.mark.parametrize("order", [release(("p9.0", 5)), release(("p0.0", 1)), release(("p0.0", 0))])
def test_hand_over_skips_unknown_and_newer_trajectories(order: Release) -> None:
    rig = Rig()
    rig.replica.accept(assignment())
    rig.steps(1)
    assert rig.replica.hand_over(order) == []
    assert rig.replica.busy()


def test_hand_over_skips_trajectories_too_large_for_an_inbox() -> None:
    rig = Rig()
    long = prompt(0, 1)
    long = replace(long, sampling=replace(long.sampling, max_new_tokens=10**6))
    rig.replica.accept(assignment(prompt=long))
    rig.steps(1)
    assert rig.replica.hand_over(release(("p0.0", 5))) == []


# -- reservations -----------------------------------------------------------------------------------------------------


def test_reservation_keeps_the_weights_until_fulfilled() -> None:
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


def test_reservation_expires() -> None:
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
def test_reservation_is_rejected_without_room(order: Reserve, why: str) -> None:
    rig = Rig()
    rig.replica.accept(assignment())
    rig.steps(1)
    news = rig.replica.changes
    rig.replica.reserve(order)
    assert (rig.replica.reserved, rig.replica.changes) == ((), news), why


def test_reservations_add_up() -> None:
    rig = Rig()
    rig.replica.reserve(reserve("p0.0", "p1.0", kv=600, plan="a"))
    rig.replica.reserve(reserve("p2.0", kv=500, plan="b"))
    rig.replica.reserve(reserve("p3.0", "p4.0", "p5.0", kv=1, plan="c"))
    assert rig.replica.reserved == ("a",)
    rig.replica.cancel({"p0.0": 9})
    rig.replica.reserve(reserve("p2.0", kv=500, plan="b"))
    assert rig.replica.reserved == ("a", "b")


# -- draining and interrupting ----------------------------------------------------------------------------------------


def test_draining_replica_rejects_reservations() -> None:
    rig = Rig()
    news = rig.replica.changes
    rig.replica.drain()
    assert (rig.replica.state, rig.replica.changes) == ("draining", news + 1)
    rig.replica.reserve(reserve("p0.0"))
    assert rig.replica.reserved == ()
    rig.replica.accept(assignment())
    assert isinstance(rig.steps(12)[-1], Trajectory)  # it finishes its own trajectories


def test_interrupt_records_a_version_span_per_version() -> None:
    rig = Rig(interrupts=True)
    rig.replica.accept(assignment())
    events = rig.steps(3)
    rig.publish(1)
    events += rig.steps(4)
    rig.publish(2)
    events += rig.steps(5)
    done = events[-1]
    assert isinstance(done, Trajectory)
    spans = tuple(VersionSpan(version(number), length) for number, length in ((0, 3), (1, 4), (2, 5)))
    assert done.version_spans == spans
    assert done.response.token_ids.to_pylist() == [0] * 3 + [1] * 4 + [2] * 5
    first, second = [event for event in events if isinstance(event, Progress)]
    assert first.version_spans == (VersionSpan(version(0), 3), VersionSpan(version(1), 1))
    assert second.version_spans == (VersionSpan(version(1), 3), VersionSpan(version(2), 1))


def test_evaluation_is_not_interrupted() -> None:
    rig = Rig(interrupts=True)
    pinned = prompt(0, 1, purpose="evaluation", policy_version=version(0))
    rig.replica.accept(assignment(prompt=pinned, under=version(0)))
    rig.steps(3)
    rig.publish(1)
    (done,) = [event for event in rig.steps(10) if isinstance(event, Trajectory)]
    assert done.version_spans == (VersionSpan(version(0), 12),)


def test_missing_version_is_retryable_for_training_only() -> None:
    rig = Rig(held=2)
    rig.weights.remove(version(0))
    pinned = prompt(1, 1, purpose="evaluation", policy_version=version(0))
    rig.replica.accept(assignment(0, under=version(0)))
    rig.replica.accept(assignment(prompt=pinned, under=version(0)))
    refused = [event for event in rig.steps(2) if isinstance(event, AssignmentRejected)]
    assert [(event.trajectory_id, event.retry) for event in refused] == [("p0.0", True), ("e1.0", False)]
