"""The metric of agents: totals of finished episodes, each counted once, also after a restart."""

from __future__ import annotations

from record_factories import prompt, trajectory

from operators.gateway.episode_table import OpenEpisode, RequestedTurn
from operators.gateway.serve_agents import EVERY_MS, EpisodeCounts
from operators.io.elements import PartitionKey, ReceivedRecord
from schemas.columns import token_ids
from schemas.records import TokenRange, TurnEnded, TurnRequest


def episode(number: int) -> OpenEpisode:
    """Two turns of one conversation: 1 s before the first, 2 s in requests, 3 s in all."""
    found = OpenEpisode(prompt(number, 1, environment="agent"), 0, 1, 0, 1, assigned_at=1000, tool_calls=2)
    for name, start, at, context in (("a", 0, 2000, ()), ("b", 4, 3500, (TokenRange(0, 4),))):
        asked = TurnRequest(
            *(
                "p0.0",
                1,
                0,
                1,
                name,
                name,
                start,
                context,
                token_ids([1, 2]),
                8,
                (),
                "[]",
                "[]",
                False,
                at,
                bool(context),
            )
        )
        found.turns[name] = RequestedTurn(
            asked, TurnEnded("p0.0", 1, 0, 1, name, start, start + 4, "stop", None, at + 1000)
        )
    return found


def ended(number: int, offset: int, partition: int = 0) -> ReceivedRecord:
    asked = prompt(number, 1, environment="agent")
    return ReceivedRecord("trajectories", partition, offset, trajectory(asked, 0, finished_at=5000))


TOTALS = {
    "episodes": 1.0,
    "failed": 0.0,
    "turns": 2.0,
    "conversations": 1.0,
    "tool_calls": 2.0,
    "rewritten": 1.0,
    "waiting_s": 1.0,
    "model_s": 2.0,
    "agent_s": 1.0,
}


def test_metric_has_the_totals_and_is_written_once() -> None:
    counts = EpisodeCounts(0, 1)
    assert counts.metric(EVERY_MS) is None
    counts.add(episode(0), ended(0, 0))
    metric = counts.metric(EVERY_MS)
    assert metric is not None
    assert (metric.name, metric.step, metric.values) == ("agents", 0, TOTALS)
    counts.add(episode(1), ended(1, 1))
    assert counts.metric(EVERY_MS + 1) is None, "the last metric is too new"
    assert counts.metric(2 * EVERY_MS) is not None
    assert counts.metric(3 * EVERY_MS) is None


def test_processes_count_their_own_episodes() -> None:
    counts = EpisodeCounts(1, 2)
    counts.add(episode(0), ended(0, 0))
    assert counts.metric(EVERY_MS) is None
    counts.add(episode(1), ended(1, 1))
    assert counts.metric(EVERY_MS) is not None


def test_state_of_a_commit_does_not_change_with_later_records() -> None:
    """A note with newer offsets than totals would lose episodes, because it is written while records are folded."""
    counts, place = EpisodeCounts(0, 1), PartitionKey("trajectories", 0)
    state = counts.state({place: 1})
    counts.add(episode(0), ended(0, 1))
    counts.state({place: 2})
    assert state == {"totals": {}, "counted": {"0": 1}}


def test_restart_does_not_count_an_episode_again() -> None:
    before = EpisodeCounts(0, 1)
    before.add(episode(0), ended(0, 4, partition=2))
    state = before.state({PartitionKey("trajectories", 2): 5, PartitionKey("inbox", 2): 0})
    again = EpisodeCounts(0, 1, state)
    again.add(episode(0), ended(0, 4, partition=2))
    assert again.metric(EVERY_MS) is None
    again.add(episode(1), ended(1, 5, partition=2))
    metric = again.metric(EVERY_MS)
    assert metric is not None
    assert metric.values == {name: 2 * value for name, value in TOTALS.items()}
