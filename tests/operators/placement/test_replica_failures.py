"""Replicas that die, time out or return: their work resumes under the next lease, and ends."""

from __future__ import annotations

import pytest
from placement_harness import (
    BOTH,
    TIMEOUT_S,
    Placement,
    assigned,
    dead_letters,
    failed_by_placement,
    leases,
    newest,
    with_one_prompt,
)
from record_factories import prompt, trajectory

from operators.io.elements import PartitionKey
from schemas.records import Assignment
from schemas.topics import REPLICAS


@pytest.fixture
def placement() -> Placement:
    return with_one_prompt()


def test_silent_replica_is_fenced_and_its_work_reassigned(placement: Placement) -> None:
    placement.beat(1, newest())
    placement.run(TIMEOUT_S / 2)
    placement.beat(1, newest())
    placement.run(TIMEOUT_S / 2)
    assert placement.fenced == []
    placement.beat(1, newest())
    outputs = placement.run(0.1)
    assert placement.fenced == [0]
    assert assigned(outputs) == [("p0.0", 1, 2), ("p0.1", 1, 2)]
    assert min(leases(outputs).values()) > 2
    assert placement.run() == []
    assert placement.fenced == [0]


def test_heartbeats_of_a_fenced_incarnation_are_ignored(placement: Placement) -> None:
    placement.run(TIMEOUT_S / 2)
    placement.run(TIMEOUT_S / 2)
    placement.run(0.1)
    placement.beat(0, newest())
    assert placement.run() == []
    placement.beat(0, newest(), incarnation=2)
    assert assigned(placement.run()) == [("p0.0", 0, 2), ("p0.1", 0, 2)]


@pytest.mark.parametrize(("incarnation", "state"), [(2, "running"), (2, "starting"), (1, "stopped")])
def test_ended_incarnation_loses_its_work_at_once(placement: Placement, incarnation: int, state: str) -> None:
    placement.beat(1, newest())
    placement.run()
    placement.beat(0, newest(), incarnation, state=state, capacity=0)
    assert assigned(placement.run()) == [("p0.0", 1, 2), ("p0.1", 1, 2)]
    assert placement.fenced == []


def test_ended_incarnation_keeps_work_until_its_records_are_read(placement: Placement) -> None:
    placement.beat(1, newest())
    placement.finish(trajectory(prompt(0), 0))
    placement.beat(0, newest(), incarnation=2, state="starting", capacity=0)
    assert placement.shard.turn(only=[PartitionKey(REPLICAS.short_name, 0)]) == ()
    placement.kafka_is_away = True
    assert assigned(placement.run()) == [("p0.1", 1, 2)]  # the ends were known before
    placement.restart()
    assert placement.run() == []


def test_work_of_an_ended_incarnation_waits_for_log_ends(placement: Placement) -> None:
    placement.beat(1, newest())
    placement.beat(0, newest(), incarnation=2, state="starting", capacity=0)
    placement.kafka_is_away = True
    assert assigned(placement.run()) == []
    placement.kafka_is_away = False
    assert assigned(placement.run()) == [("p0.0", 1, 2), ("p0.1", 1, 2)]


def test_heartbeats_of_an_older_incarnation_are_ignored(placement: Placement) -> None:
    placement.beat(0, newest(), incarnation=0, state="stopped")
    placement.beat(1, newest())
    assert placement.run() == []


def test_pause_of_placement_fences_no_replica(placement: Placement) -> None:
    placement.run(10 * TIMEOUT_S)
    assert placement.fenced == []
    placement.run(TIMEOUT_S / 2)
    placement.run(TIMEOUT_S / 2)
    placement.run(0.1)
    assert placement.fenced == [0]


def test_no_replica_is_fenced_while_kafka_is_unavailable(placement: Placement) -> None:
    placement.kafka_is_away = True
    for _ in range(6):
        assert placement.run(TIMEOUT_S / 2 - 1) == []
    placement.kafka_is_away = False
    assert placement.run(TIMEOUT_S / 4) == []
    placement.beat(0, newest())
    for _ in range(2):
        assert placement.run(TIMEOUT_S / 2 - 1) == []
    assert placement.fenced == []
    for _ in range(2):
        placement.run(TIMEOUT_S / 2 - 1)
    assert placement.fenced == [0]


def test_older_incarnation_does_not_vouch_for_a_later_one() -> None:
    placement = Placement()
    placement.prompts(0)
    first = placement.publish(0)
    placement.beat(0, first, incarnation=2)
    assert assigned(placement.run()) == BOTH
    placement.restart()
    placement.beat(0, first, incarnation=1)  # fenced long ago, but it still sends heartbeats
    placement.beat(1, first)
    assert placement.run() == []
    placement.beat(0, first, incarnation=2)
    assert placement.run() == []
    placement.beat(0, first, incarnation=2, state="stopped")
    assert assigned(placement.run()) == [("p0.0", 1, 2), ("p0.1", 1, 2)]


def test_unreported_incarnation_times_out_after_a_restart() -> None:
    placement = Placement()
    placement.prompts(0)
    first = placement.publish(0)
    placement.beat(0, first, incarnation=2)
    placement.run()
    placement.restart()
    for _ in range(4):
        placement.beat(0, first, incarnation=1)
        placement.beat(1, first)
        outputs = placement.run(TIMEOUT_S / 2 - 1)
    assert placement.fenced == [0]
    assert assigned(outputs) == [("p0.0", 1, 2), ("p0.1", 1, 2)]


def test_suspected_poison_prompt_runs_alone_on_its_last_attempt() -> None:
    """Four trajectories share a replica that dies each time; one of them is the cause."""
    placement = Placement(max_attempts=3)
    placement.prompts(0, 1, samples=2)
    first = placement.publish(0)
    for incarnation in range(1, 4):
        placement.beat(0, first, incarnation=incarnation)
        outputs = placement.run()
    assert assigned(outputs) == [("p0.0", 0, 3)]  # the others wait, since this one may be the cause
    placement.beat(0, first, incarnation=4)
    outputs = placement.run()
    assert failed_by_placement(outputs) == {"p0.0": "given up after 3 attempts"}
    for name, lease in leases(outputs).items():
        assert name == "p0.1"
        placement.finish(trajectory(prompt(0), 1, lease=lease))
    assert assigned(placement.run()) == [("p1.0", 0, 3)]


def test_last_attempt_starts_on_any_replica_without_one() -> None:
    """The least loaded replica has one already, and no group may begin."""
    placement = Placement(max_attempts=3)
    first = placement.publish(0)
    placement.prompts(0, samples=3)
    placement.beat(1, first)
    placement.run()
    placement.prompts(1)
    for incarnation in range(1, 4):
        placement.beat(0, first, incarnation=incarnation)
        outputs = placement.run()
    assert assigned(outputs) == [("p1.0", 0, 3), ("p1.1", 1, 3)]


def test_trajectory_that_kills_its_replicas_fails() -> None:
    placement = Placement(max_attempts=3)
    placement.prompts(0, samples=1)
    first = placement.publish(0)
    for incarnation in (1, 2, 3):
        placement.beat(0, first, incarnation=incarnation)
        assert assigned(placement.run()) == [("p0.0", 0, incarnation)]
    placement.beat(0, first, incarnation=4)
    outputs = placement.run()
    assert failed_by_placement(outputs) == {"p0.0": "given up after 3 attempts"}
    assert assigned(outputs) == []
    assert placement.run() == []


def test_sessions_that_are_lost_are_no_attempts() -> None:
    """As long as Kafka comes and goes, the process of a replica begins one incarnation after the other."""
    placement = Placement(max_attempts=2)
    placement.prompts(0, samples=1)
    first = placement.publish(0)
    for incarnation in range(1, 6):
        placement.beat(0, first, incarnation=incarnation, first_incarnation=1)
        assert assigned(placement.run()) == [("p0.0", 0, 1)]
        if incarnation == 3:
            placement.restart()
    for incarnation in (6, 7):
        placement.beat(0, first, incarnation=incarnation, first_incarnation=incarnation)
        outputs = placement.run()
    assert failed_by_placement(outputs) == {"p0.0": "given up after 2 attempts"}


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "heartbeat of run 'other', not of 'run'"),
        ({"incarnation": 7, "run": ""}, "heartbeat of run '', not of 'run'"),
    ],
)
def test_heartbeats_of_another_run_become_dead_letters(changes: dict, reason: str) -> None:
    placement = Placement()
    placement.prompts(0)
    placement.beat(0, placement.publish(0), **changes)
    outputs = placement.run()
    assert dead_letters(outputs) == [reason]
    assert assigned(outputs) == []


def test_absurd_incarnation_does_not_mask_the_replica() -> None:
    placement = Placement()
    placement.prompts(0)
    newest = placement.publish(0)
    placement.beat(0, newest, incarnation=10**9)  # before anything is known of it
    placement.beat(0, newest, incarnation=3)
    placement.beat(0, newest, incarnation=50_000)
    outputs = placement.run()
    assert [reason.rpartition(", ")[2] for reason in dead_letters(outputs)] == ["-1", "3"]
    assert {o.record.incarnation for o in outputs if isinstance(o.record, Assignment)} == {3}


@pytest.mark.parametrize("replica", [4, -1])
def test_replica_without_an_inbox_gets_no_work(replica: int) -> None:
    placement = Placement()
    placement.prompts(0)
    placement.beat(replica, placement.publish(0))
    outputs = placement.run()
    assert dead_letters(outputs) == [f"replica {replica} has no inbox: there are 4"]
    assert assigned(outputs) == []
