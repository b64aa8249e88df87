"""The relay chain: tables of live relays and their versions, and the time-outs of the manager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from placement_harness import Placement
from record_factories import prompt, trajectory, version

from operators.io.elements import Output
from operators.placement.relay_chain import LiveRelay, RelayChainManager, plan_chain
from schemas.records import PolicyVersion, RelayChain, RelayLink, RelayStatus, Trajectory

NEWEST = 5
TIMEOUT_S = 10.0


def link(relay: int, address: str = "") -> RelayLink:
    return RelayLink(relay, address or f"host-{relay}:1", f"host-{relay}", "/store")


def before(order: str, joining: str = "") -> RelayChain | None:
    if not order:
        return None
    return RelayChain(1, tuple(map(link, map(int, order))), tuple(map(int, joining)), "chain", 0)


@pytest.mark.parametrize(
    ("order", "joined", "held", "expected", "joining"),
    [
        ("", "", {0: None}, "0", ""),  # the first relay
        ("", "", {0: None, 1: None, 2: None}, "012", ""),
        ("", "", {0: None, 1: 3, 2: 5}, "201", "01"),  # the trainer runs beside relay 2
        ("", "", {0: 5, 1: 5}, "01", ""),
        ("012", "", {0: 5, 1: 4, 2: 4}, "012", ""),  # during a broadcast no relay joins
        ("012", "", {0: 5, 2: 4}, "02", ""),
        ("012", "", {1: 4, 2: 5}, "21", ""),  # the master is gone: the complete relay
        ("012", "", {1: 4, 2: 4}, "12", ""),  # no relay is complete: the next
        ("012", "", {1: 4, 2: 4, 3: 5}, "312", ""),  # a new relay, if only it is complete
        ("012", "", {0: 5, 1: 5, 2: 5, 3: None}, "0123", "3"),  # a new relay lacks the version
        ("012", "", {0: 5, 1: 5, 2: 5, 3: 5}, "0123", ""),
        ("0123", "3", {0: 5, 1: 5, 2: 5, 3: 4}, "0123", "3"),
        ("0123", "3", {0: 5, 1: 5, 2: 5, 3: 5}, "0123", ""),  # it has caught up
        ("0123", "3", {0: 4, 1: 4, 2: 4, 3: 4}, "0123", ""),  # no relay is complete, so none is joining
        ("21", "", {2: 4, 1: 5}, "21", ""),  # the master stays while it is alive
        ("012", "1", {}, "012", "1"),  # no live relay: the chain is unchanged
    ],
)
def test_plan_chain_orders_relays_and_joining(
    order: str, joined: str, held: dict[int, int | None], expected: str, joining: str
) -> None:
    alive = {
        relay: LiveRelay(link(relay), None if number is None else version(number), number == NEWEST)
        for relay, number in held.items()
    }
    links, new = plan_chain(before(order, joined), alive)
    assert ("".join(str(each.relay) for each in links), "".join(map(str, new))) == (expected, joining)


def beat(manager: RelayChainManager, relay: int, now: float, *held: int, address: str = "", **fields: Any) -> None:
    versions = tuple(str(version(number)) for number in held)
    where = address or f"host-{relay}:1"
    made = RelayStatus(relay, versions, 0, f"host-{relay}", 1, 0, address=where, store="/store", **fields)
    manager.record_heartbeat(made, now)


def order(chain: RelayChain | None) -> list[int]:
    assert chain is not None
    return [each.relay for each in chain.links]


def test_chain_is_written_on_change_with_rising_numbers() -> None:
    manager = RelayChainManager(TIMEOUT_S, "binomial")
    assert manager.next_chain(0.0, None, 0) is None
    beat(manager, 0, 0.0)
    first = manager.next_chain(0.0, None, 7)
    assert first == RelayChain(1, (link(0),), (), "binomial", 7)
    beat(manager, 0, 1.0, 5)
    assert manager.next_chain(1.0, version(5), 8) is None
    beat(manager, 1, 2.0)
    second = manager.next_chain(2.0, version(5), 9)
    assert (second and second.number, order(second), second and second.joining) == (2, [0, 1], (1,))
    beat(manager, 1, 3.0, 5)
    third = manager.next_chain(3.0, version(5), 9)
    assert third is not None
    assert (third.number, third.joining) == (3, ())


def test_chain_replaces_a_silent_master_by_a_complete_relay() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    for relay in range(3):
        beat(manager, relay, 0.0, 5)
    assert order(manager.next_chain(0.0, version(5), 0)) == [0, 1, 2]
    beat(manager, 1, 9.0, 5)
    beat(manager, 2, 9.0, 5, 6)
    assert manager.next_chain(TIMEOUT_S, version(6), 0) is None
    assert order(manager.next_chain(TIMEOUT_S + 0.1, version(6), 0)) == [2, 1]


def test_chain_replaces_an_empty_master() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    beat(manager, 2, 0.0)
    assert order(manager.next_chain(0.0, None, 0)) == [2]
    beat(manager, 0, 1.0)
    assert order(manager.next_chain(1.0, None, 0)) == [2, 0]  # no relay holds a version yet
    beat(manager, 0, 2.0, 5)
    assert order(manager.next_chain(2.0, version(5), 0)) == [0, 2]
    beat(manager, 2, 3.0, 5)
    assert manager.next_chain(3.0, version(5), 0) is None  # unchanged


def test_relay_at_a_new_address_keeps_its_position() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    for relay in range(2):
        beat(manager, relay, 0.0)
    manager.next_chain(0.0, None, 0)
    beat(manager, 0, 1.0, address="host-0:2")
    moved = manager.next_chain(1.0, None, 0)
    assert moved is not None
    assert moved.links == (link(0, "host-0:2"), link(1))


def test_relay_with_an_unreachable_address_has_no_place() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    for relay in range(3):
        beat(manager, relay, 0.0, 5)
    assert order(manager.next_chain(0.0, version(5), 0)) == [0, 1, 2]
    beat(manager, 2, 1.0, 5, unreachable=("host-0:1", "host-1:1"))
    beat(manager, 1, 1.0, 5, sent=9)  # its address has worked: a fault of the moment
    assert order(manager.next_chain(1.0, version(5), 0)) == [1, 2]  # also the master
    beat(manager, 0, 2.0, 5, address="host-0:2")  # restarted with another address
    assert order(manager.next_chain(2.0, version(5), 0)) == [1, 2, 0]


def test_refused_relay_is_logged_once_with_its_reporter(caplog: pytest.LogCaptureFixture) -> None:

    def messages() -> list[str]:
        return [each.message for each in caplog.records if each.name == RelayChainManager.__module__]

    manager = RelayChainManager(TIMEOUT_S, "chain")
    beat(manager, 1, 0.0, 5)
    for _ in range(2):
        beat(manager, 2, 0.0, 5, unreachable=("host-1:1",))
        manager.next_chain(0.0, version(5), 0)
    (line,) = messages()
    assert line.endswith("relay 1 at host-1:1 (reported by relay 2 of machine host-2)")
    beat(manager, 2, 1.0, 5)
    manager.next_chain(1.0, version(5), 0)
    assert messages()[1:] == ["relays without a place in the chain, as others cannot connect: none"]


def test_relays_that_report_each_other_keep_their_places() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    beat(manager, 0, 0.0, 5, unreachable=("host-1:1",))
    beat(manager, 1, 0.0, 5, unreachable=("host-0:1",))
    assert order(manager.next_chain(0.0, version(5), 0)) == [0, 1]


def test_chain_is_kept_for_a_timeout_after_a_restart() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    chain = before("01")
    assert chain is not None
    manager.record_chain(chain, 0.0)
    assert manager.next_chain(0.0, version(5), 0) is None
    beat(manager, 1, 5.0, 5)
    assert manager.next_chain(5.0, version(5), 0) is None
    manager.reset_timeouts(8.0)
    assert manager.next_chain(15.0, version(5), 0) is None
    beat(manager, 1, 18.0, 5)
    left = manager.next_chain(18.1, version(5), 0)
    assert (order(left), left and left.number) == ([1], 2)


def test_placement_does_not_rewrite_the_chain_after_a_restart() -> None:
    placement = Placement()
    placement.relay_beats(3)
    (output,) = chains(placement)
    assert (output.topic.short_name, output.key, order(output.record)) == ("relay-chain", "run", [3])
    assert not chains(placement)
    placement.restart()
    placement.relay_beats(3)
    assert not chains(placement)


def test_chain_that_contradicts_the_newest_adds_no_relay() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    newest = replace(before("01"), number=5)  # type: ignore[type-var]
    for chain in (newest, replace(newest, links=(link(7),)), replace(newest, number=3, links=(link(8),))):
        assert manager.record_chain(chain, 0.0)
    assert manager.next_chain(1.0, version(NEWEST), 0) is None


def test_relays_that_only_an_earlier_chain_names_are_forgotten() -> None:
    manager = RelayChainManager(TIMEOUT_S, "chain")
    for number, relays in ((3, "078"), (5, "01")):
        manager.record_chain(replace(before(relays), number=number), 0.0)  # type: ignore[type-var]
    assert manager.next_chain(1.0, version(NEWEST), 0) is None


def chains(placement: Placement) -> list[Output]:
    return [output for output in placement.run() if isinstance(output.record, RelayChain)]


def test_foreign_chain_is_rejected_and_replaced() -> None:
    manager = RelayChainManager(10.0, "chain", number=0)
    beat(manager, 0, 0.0)
    first = manager.next_chain(0.0, None, 0)
    assert first is not None
    assert manager.record_chain(first, 0.0)
    assert not manager.record_chain(replace(first, number=10**15, links=()), 1.0)
    again = manager.next_chain(1.0, None, 0)
    assert again is not None
    assert (again.number, again.links) == (2, first.links)
    assert manager.next_chain(2.0, None, 0) is None
    restarted = RelayChainManager(10.0, "chain", number=again.number)
    assert [restarted.record_chain(chain, 0.0) for chain in (first, replace(first, number=10**15), again)] == [
        True,
        False,
        True,
    ]


def test_chain_names_the_versions_that_waiting_questions_need() -> None:
    placement = Placement()
    old = placement.publish(0)
    placement.relay_beats(0)
    placement.questions(*range(6), under=old)
    new = placement.publish(1)
    placement.questions(6, under=new)
    assert needed(placement) == [(old, new)]
    placement.restart()
    placement.relay_beats(0)
    assert needed(placement) == []  # unchanged
    placement.beat(0, old)
    placement.run()
    placement.beat(0, old, state="stopped")
    placement.run()
    placement.beat(1, old, capacity=50)
    assert needed(placement) == []  # lost questions need it too
    placement.finish(*(answered(number, under=old) for number in range(6)))
    placement.beat(1, new)
    assert needed(placement) == [(new,)]  # the last question is with a replica
    placement.finish(answered(6, under=new))
    assert needed(placement) == [()]


def needed(placement: Placement) -> list[tuple[PolicyVersion, ...]]:
    return [output.record.needed for output in chains(placement)]


def answered(number: int, under: PolicyVersion) -> Trajectory:
    return trajectory(prompt(number, 1, purpose="evaluation", policy_version=under), 0, under=under)
