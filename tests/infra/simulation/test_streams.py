"""Random streams: what one component draws changes no draw of another."""

from __future__ import annotations

from collections import Counter

from simulated_sessions import World, open_session

from infra.kafka.simulated_clients import SimulatedClients
from infra.simulation.streams import Streams


def test_stream_depends_on_seed_and_name_alone() -> None:
    alone, among = Streams(7), Streams(7)
    among.of("score", "Produce").random()
    expected = [alone.of("trainer", "Produce").random() for _ in range(3)]
    found = []
    for _ in range(3):
        among.of("score", "Fetch").random()
        found.append(among.of("trainer", "Produce").random())
    assert found == expected
    assert expected[0] != Streams(8).of("trainer", "Produce").random()


def test_choose_follows_the_weights() -> None:
    counts = Counter(Streams(seed).choose("kind", {"kill": 3.0, "pause": 1.0}) for seed in range(2000))
    assert 0.7 < counts["kill"] / 2000 < 0.8


def test_choose_changes_only_where_a_new_name_wins() -> None:
    before, after = {"kill": 3.0, "pause": 1.0}, {"kill": 3.0, "pause": 1.0, "cut": 1.0}
    pairs = [(Streams(seed).choose("kind", before), Streams(seed).choose("kind", after)) for seed in range(500)]
    assert {found for wanted, found in pairs if wanted != found} == {"cut"}


def test_another_process_changes_no_latency() -> None:
    def times(others: bool) -> list[float]:
        world, found = World(3), list[float]()

        def commits(clients: SimulatedClients) -> None:
            session = open_session(clients)
            for _ in range(5):
                session.commit([], {}, {}, {"n": len(found)})
                found.append(world.scheduler.now)

        world.process("copier", commits)
        if others:
            world.process("other", lambda clients: open_session(clients, "other"))
        world.scheduler.run(until=5)
        assert world.errors == {"copier": None, **({"other": None} if others else {})}
        return found

    assert times(others=True) == times(others=False)
