"""The chain of relays: a table of who lives and what they hold, and the keeper's clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_harness import Placement
from record_factories import version

from operators.io.elements import Output
from operators.placement.relay_chain import LiveRelay, RelayChainKeeper, chain_of
from schemas.records import RelayChain, RelayLink, RelayStatus

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
        ("", "", {0: None}, "0", ""),  # the first of all
        ("", "", {0: None, 1: None, 2: None}, "012", ""),
        ("", "", {0: None, 1: 3, 2: 5}, "201", "01"),  # a trainer has published beside 2
        ("", "", {0: 5, 1: 5}, "01", ""),
        ("012", "", {0: 5, 1: 4, 2: 4}, "012", ""),  # a broadcast under way: nobody joins
        ("012", "", {0: 5, 2: 4}, "02", ""),
        ("012", "", {1: 4, 2: 5}, "21", ""),  # the master is gone: who is complete
        ("012", "", {1: 4, 2: 4}, "12", ""),  # nobody is: the next
        ("012", "", {1: 4, 2: 4, 3: 5}, "312", ""),  # a new one, if it alone is
        ("012", "", {0: 5, 1: 5, 2: 5, 3: None}, "0123", "3"),  # a new one lacks it
        ("012", "", {0: 5, 1: 5, 2: 5, 3: 5}, "0123", ""),
        ("0123", "3", {0: 5, 1: 5, 2: 5, 3: 4}, "0123", "3"),
        ("0123", "3", {0: 5, 1: 5, 2: 5, 3: 5}, "0123", ""),  # it has caught up
        ("0123", "3", {0: 4, 1: 4, 2: 4, 3: 4}, "0123", ""),  # nobody has it: it stands with the others
        ("21", "", {2: 4, 1: 5}, "21", ""),  # the master stays as long as it lives
        ("012", "1", {}, "012", "1"),  # nobody lives: the last chain stands
    ],
)
def test_chain_of(order: str, joined: str, held: dict[int, int | None], expected: str, joining: str) -> None:
    alive = {
        relay: LiveRelay(link(relay), None if number is None else version(number), number == NEWEST)
        for relay, number in held.items()
    }
    links, new = chain_of(before(order, joined), alive)
    assert ("".join(str(each.relay) for each in links), "".join(map(str, new))) == (expected, joining)


def beat(keeper: RelayChainKeeper, relay: int, now: float, *held: int, address: str = "") -> None:
    versions = tuple(str(version(number)) for number in held)
    where = address or f"host-{relay}:1"
    keeper.hear(RelayStatus(relay, versions, 0, f"host-{relay}", 1, 0, address=where, store="/store"), now)


def order(chain: RelayChain | None) -> list[int]:
    assert chain is not None
    return [each.relay for each in chain.links]


def test_a_chain_is_written_when_it_changes_and_numbers_rise() -> None:
    keeper = RelayChainKeeper(TIMEOUT_S, "binomial")
    assert keeper.decide(0.0, None, 0) is None
    beat(keeper, 0, 0.0)
    first = keeper.decide(0.0, None, 7)
    assert first == RelayChain(1, (link(0),), (), "binomial", 7)
    beat(keeper, 0, 1.0, 5)
    assert keeper.decide(1.0, version(5), 8) is None
    beat(keeper, 1, 2.0)
    second = keeper.decide(2.0, version(5), 9)
    assert (second and second.number, order(second), second and second.joining) == (2, [0, 1], (1,))
    beat(keeper, 1, 3.0, 5)
    third = keeper.decide(3.0, version(5), 9)
    assert third is not None
    assert (third.number, third.joining) == (3, ())


def test_a_silent_master_is_followed_by_who_is_complete() -> None:
    keeper = RelayChainKeeper(TIMEOUT_S, "chain")
    for relay in range(3):
        beat(keeper, relay, 0.0, 5)
    assert order(keeper.decide(0.0, version(5), 0)) == [0, 1, 2]
    beat(keeper, 1, 9.0, 5)
    beat(keeper, 2, 9.0, 5, 6)
    assert keeper.decide(TIMEOUT_S, version(6), 0) is None
    assert order(keeper.decide(TIMEOUT_S + 0.1, version(6), 0)) == [2, 1]


def test_who_was_heard_first_but_holds_nothing_gives_way_to_who_does() -> None:
    keeper = RelayChainKeeper(TIMEOUT_S, "chain")
    beat(keeper, 2, 0.0)
    assert order(keeper.decide(0.0, None, 0)) == [2]
    beat(keeper, 0, 1.0)
    assert order(keeper.decide(1.0, None, 0)) == [2, 0]  # nobody has anything yet
    beat(keeper, 0, 2.0, 5)
    assert order(keeper.decide(2.0, version(5), 0)) == [0, 2]
    beat(keeper, 2, 3.0, 5)
    assert keeper.decide(3.0, version(5), 0) is None  # it stays


def test_one_that_comes_back_elsewhere_keeps_its_place() -> None:
    keeper = RelayChainKeeper(TIMEOUT_S, "chain")
    for relay in range(2):
        beat(keeper, relay, 0.0)
    keeper.decide(0.0, None, 0)
    beat(keeper, 0, 1.0, address="host-0:2")
    moved = keeper.decide(1.0, None, 0)
    assert moved is not None
    assert moved.links == (link(0, "host-0:2"), link(1))


def test_after_a_restart_the_last_chain_stands_until_its_relays_had_time_to_be_heard() -> None:
    keeper = RelayChainKeeper(TIMEOUT_S, "chain")
    chain = before("01")
    assert chain is not None
    keeper.learn(chain, 0.0)
    assert keeper.decide(0.0, version(5), 0) is None
    beat(keeper, 1, 5.0, 5)
    assert keeper.decide(5.0, version(5), 0) is None
    keeper.forgive(8.0)
    assert keeper.decide(15.0, version(5), 0) is None
    beat(keeper, 1, 18.0, 5)
    left = keeper.decide(18.1, version(5), 0)
    assert (order(left), left and left.number) == ([1], 2)


def test_placement_writes_it_once_and_a_restart_does_not_repeat_it() -> None:
    placement = Placement()
    placement.relay_beats(3)
    (output,) = chains(placement)
    assert (output.topic.short_name, output.key, order(output.record)) == ("relay-chain", "run", [3])
    assert not chains(placement)
    placement.restart()
    placement.relay_beats(3)
    assert not chains(placement)


def chains(placement: Placement) -> list[Output]:
    return [output for output in placement.run() if isinstance(output.record, RelayChain)]


def test_a_chain_that_is_not_of_placement_is_refused_and_written_over() -> None:
    keeper = RelayChainKeeper(10.0, "chain", number=0)
    beat(keeper, 0, 0.0)
    first = keeper.decide(0.0, None, 0)
    assert first is not None
    assert keeper.learn(first, 0.0)
    assert not keeper.learn(replace(first, number=10**15, links=()), 1.0)
    again = keeper.decide(1.0, None, 0)
    assert again is not None
    assert (again.number, again.links) == (2, first.links)
    assert keeper.decide(2.0, None, 0) is None
    restarted = RelayChainKeeper(10.0, "chain", number=again.number)
    assert [restarted.learn(chain, 0.0) for chain in (first, replace(first, number=10**15), again)] == [
        True,
        False,
        True,
    ]
