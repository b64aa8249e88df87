"""Episodes of agents on the transformers engine: turns, branches, and their independence from moves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factories import prompt, version
from scripted_engine import ScriptedWeights
from tiny_engines import OnDisk, engine, plain_logprobs
from tiny_models import VOCABULARY, tiny_model

from infra.models.weights import save_weights
from operators.rollout.agent_episodes import AgentEngine, EndedTurn, join_segments
from operators.rollout.engine import PartialResponse, Request
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.replica import Replica
from operators.rollout.running_request import request_of, response_of
from schemas.columns import token_ids
from schemas.records import (
    Assignment,
    EpisodeEnd,
    Progress,
    Response,
    Sampling,
    Segment,
    TokenRange,
    Trajectory,
    TurnRequest,
)

WHOLE = Segment(5, (TokenRange(0, 21),))


def agent_engine(kv_bytes: int = 10**8, **options: Any) -> AgentEngine:
    inner = EpisodeEngine(engine(**options), {}, lambda text: [], lambda tokens: "".join(map(chr, tokens)))
    return AgentEngine(inner, kv_bytes)


def question(number: int = 0, budget: int = 60) -> Any:
    sampling = Sampling(1.0, 1.0, 0, max_new_tokens=budget, stop_token_ids=(), seed=3)
    return prompt(number, 1, token_ids=token_ids([1, 2]), sampling=sampling, environment="agent")


def assignment(partial: Response | None = None, lease: int = 1) -> Assignment:
    return Assignment(question(), 0, lease, 1, 0, 1, None, partial, 0)


def turn(start: int, new: list[int], *context: tuple[int, int], most: int = 6, name: str = "", lease: int = 1) -> Any:
    ranges = tuple(TokenRange(*each) for each in context)
    return TurnRequest(
        "p0.0", lease, 0, 1, name or f"t{start}", "", start, ranges, token_ids(new), most, (), "[]", "[]", False, 0
    )


def end(*segments: Segment, reward: float | None = 1.0, error: str | None = None) -> EpisodeEnd:
    return EpisodeEnd("p0.0", 1, 0, 1, segments, reward, "answer", error, 0)


def play(it: AgentEngine, *turns: TurnRequest) -> list[EndedTurn]:
    ended: list[EndedTurn] = []
    for each in turns:
        it.accept(each)
        while not (news := it.take_ended_turns()):
            assert not it.step()
        ended += news
    return ended


def tokens_of(it: AgentEngine) -> PartialResponse:
    return it.generated({"p0.0": 0})["p0.0"]


def logprobs_of(prefix: np.ndarray, response: np.ndarray) -> np.ndarray:
    """The logprobs of `response` after `prefix`, by one forward."""
    one = Request("p0.0", prefix, question().sampling)
    return plain_logprobs(tiny_model(), one, PartialResponse(response, np.zeros(len(response), np.float32)))


FIRST, SECOND = turn(0, [3, 4, 5, 6, 7]), turn(11, [8, 9, 3, 2], (0, 11))


def test_turns_append_their_tokens_and_are_drawn_by_the_model() -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    ended = play(it, FIRST, SECOND)
    assert [(each.start, each.stop, each.finish_reason) for each in ended] == [(0, 11, "length"), (11, 21, "length")]
    known = tokens_of(it)
    assert known.drawn.tolist() == [*[False] * 5, *[True] * 6, *[False] * 4, *[True] * 6]
    assert known.token_ids[:5].tolist() == [3, 4, 5, 6, 7]
    assert (known.logprobs[~known.drawn] == 0).all()
    expected = logprobs_of(known.token_ids[:5], known.token_ids[5:])
    drawn = known.drawn[5:]
    np.testing.assert_allclose(known.logprobs[5:][drawn], expected[drawn], atol=1e-4)


@pytest.mark.parametrize(("episodes", "kept"), [(0, [False, False]), (1, [True, False]), (2, [True, True])])
def test_kv_of_waiting_episodes_is_kept_within_the_bound(episodes: int, kept: list[bool]) -> None:
    """In memory for `episodes` of them; the next turn of each begins with its KV or computes it again."""

    def second_turns(kv_bytes: int) -> tuple[list[bool], int]:
        it = agent_engine(kv_bytes)
        submitted: list[Request] = []
        it._engine.submit, submit = lambda each: (submitted.append(each), submit(each)), it._engine.submit  # type: ignore
        for number in range(2):
            it.submit(request_of(replace(assignment(), prompt=question(number))))
            play(it, replace(FIRST, trajectory_id=f"p{number}.0"))
        one = next((len(each.kv.data) for each in it._active.values() if each.kv is not None), 0)
        for number in range(2):
            play(it, replace(SECOND, trajectory_id=f"p{number}.0"))
        return [each.partial is not None and each.partial.kv is not None for each in submitted[2:]], one

    _, one = second_turns(10**8)
    assert second_turns(one * episodes)[0] == kept


def test_a_branch_is_generated_from_recorded_tokens() -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    ended = play(it, FIRST, SECOND, turn(21, [9], (0, 8)))
    assert (ended[2].start, ended[2].stop) == (21, 28)
    branch = tokens_of(it)
    prefix = [*branch.token_ids[:8].tolist(), 9]
    expected = logprobs_of(np.array(prefix, np.int32), branch.token_ids[22:])
    np.testing.assert_allclose(branch.logprobs[22:], expected, atol=1e-4)


def test_equal_contexts_draw_different_responses() -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    play(it, FIRST, turn(11, [], (0, 5), name="again"))
    known = tokens_of(it).token_ids
    assert known[5:11].tolist() != known[11:].tolist()


def test_a_turn_resumes_identically_in_another_engine() -> None:
    it, other = agent_engine(), agent_engine(kv_bytes=0)
    it.submit(request_of(assignment()))
    play(it, FIRST)
    it.accept(SECOND)
    for _ in range(3):
        it.step()
    partial = it.release(["p0.0"])["p0.0"]
    assert 15 < len(partial.token_ids) < 21
    other.submit(request_of(assignment(response_of(partial))))
    assert play(other, SECOND)[0].stop == 21
    it.submit(request_of(assignment(response_of(partial))))  # it kept the turn
    while not it.take_ended_turns():
        it.step()
    assert tokens_of(other).token_ids.tolist() == tokens_of(it).token_ids.tolist()


def test_an_episode_released_before_its_end_keeps_all_tokens() -> None:
    """As by an interrupt or a hand-over in the poll of the EpisodeEnd."""
    it, whole = agent_engine(), end(Segment(5, (TokenRange(0, 11),)))
    it.submit(request_of(assignment()))
    play(it, FIRST)
    it.accept(whole)
    it.accept(turn(11, [9], (0, 11)))  # too late
    assert (it.due(), it.in_turn(), it.status().running) == (0.0, False, 1)
    partial = it.release(["p0.0"])["p0.0"]
    assert len(partial.token_ids) == 11
    other = agent_engine()
    for engine_after, order in ((it, None), (other, whole)):  # the gateway repeats the order at another owner
        engine_after.submit(request_of(assignment(response_of(partial))))
        if order is not None:
            engine_after.accept(order)
        (completion,) = engine_after.step()
        assert (completion.finish_reason, len(completion.generated.token_ids)) == ("stop", 6)


def test_a_repeated_or_stale_turn_is_ignored() -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    play(it, FIRST)
    for stale in (turn(0, [3, 4, 9]), turn(12, [1], (0, 11)), turn(9, [5], (0, 5))):
        it.accept(stale)
    assert it.due() > 0
    assert not it.take_ended_turns()
    assert len(tokens_of(it).token_ids) == 11


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (turn(0, [VOCABULARY]), "not in the vocabulary"),
        (turn(0, [1] * 60), "budget of 60 tokens is used up"),
        (turn(0, [1] * 59), None),
    ],
)
def test_a_turn_that_cannot_run_ends_with_the_reason(wrong: TurnRequest, error: str | None) -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    (ended,) = play(it, wrong)
    assert (ended.error is None) == (error is None)
    assert error is None or error in (ended.error or "")
    assert error is not None or ended.stop == 60


def test_the_first_segment_is_the_response_and_others_follow_it() -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    play(it, FIRST, SECOND, turn(21, [9], (0, 8)))
    known = tokens_of(it)
    it.accept(end(Segment(5, (TokenRange(0, 8), TokenRange(21, 28))), WHOLE))
    (completion,) = it.step()
    assert completion.prompt is not None
    assert completion.prompt.tolist() == [3, 4, 5, 6, 7]
    newest, other = [*known.token_ids[5:8], *known.token_ids[21:28]], known.token_ids[:21].tolist()
    assert completion.generated.token_ids.tolist() == [*newest, *other]
    drawn = [True, True, True, False, *[True] * 6]
    once = [*[False] * 8, *[True] * 3, *[False] * 4, *[True] * 6]  # without the tokens that the first has too
    assert completion.generated.drawn.tolist() == [*drawn, *once]
    assert [(each.start, each.prompt_tokens) for each in completion.conversations] == [(0, 5), (10, 5)]
    assert completion.text == "answer"
    assert completion.episode is not None
    assert (completion.finish_reason, completion.episode.rewards) == ("stop", (1.0,))


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (end(), "the agent made no request"),
        (end(Segment(1, (TokenRange(0, 99),))), "the episode has only 11 tokens"),
        (end(WHOLE, error="exit status 3"), "exit status 3"),
    ],
)
def test_an_episode_fails_with_the_reason(order: EpisodeEnd, error: str) -> None:
    it = agent_engine()
    it.submit(request_of(assignment()))
    play(it, FIRST)
    it.accept(order)
    (completion,) = it.step()
    assert (completion.finish_reason, completion.error) == ("failed", error)


def test_replica_publishes_the_tokens_of_a_turn_before_its_end() -> None:
    weights = ScriptedWeights()
    weights.add(version(0))
    it = Replica(0, 1, agent_engine(version=version(0)), weights, str, lambda: 7)
    it.announce(version(0))
    it.accept(assignment())
    it.play(FIRST)  # it has not started yet
    it.play(turn(0, [9], lease=0))  # of an earlier owner
    assert it.turn_due() == math.inf  # no agent waits for this replica
    events: list[Any] = list(it.step())
    assert it.turn_due() == 0.0
    for _ in range(20):
        events += it.step()
    assert it.turn_due() == math.inf
    progress, ended = events
    assert isinstance(progress, Progress)
    assert (progress.start, len(progress.gained.token_ids), ended.stop) == (0, 11, 11)
    it.play(end(Segment(5, (TokenRange(0, 11),))))
    (trajectory,) = it.step()
    assert isinstance(trajectory, Trajectory)
    assert trajectory.prompt.token_ids.to_pylist() == [3, 4, 5, 6, 7]
    assert [(each.version, each.length) for each in trajectory.version_spans] == [(version(0), 6)]


def test_interrupted_episode_records_the_version_of_each_turn(tmp_path: Path) -> None:
    save_weights(tiny_model(), tmp_path / "weights")
    weights = OnDisk(tmp_path / "weights")
    it = Replica(0, 1, agent_engine(), weights, str, lambda: 7, interrupts=True)
    it.announce(version(0))
    it.accept(assignment())
    events: list[Any] = []
    for order in (FIRST, SECOND, end(WHOLE)):
        it.play(order)
        for _ in range(20):
            events += it.step()
        if order is FIRST:
            weights.held.append(version(1))
            it.announce(version(1))
    (trajectory,) = [each for each in events if isinstance(each, Trajectory)]
    spans = [(each.version, each.length) for each in trajectory.version_spans]
    assert spans == [(version(0), 6 + 4), (version(1), 6)], "what the agent gave is of the version that was there"


def test_rewards_follow_the_conversations_that_are_trained() -> None:
    """The third has no token that the others have not: it is left out with its reward."""
    drawn = np.array([False, True, True, False, True])
    segments = (Segment(1, (TokenRange(0, 3),)), Segment(1, (TokenRange(3, 5),)), Segment(1, (TokenRange(0, 2),)))
    found = join_segments(segments, "[]", drawn, whole=False, rewards=(1.0, 0.5, 0.25))
    assert (len(found.conversations), found.rewards) == (2, (1.0, 0.5))
    assert join_segments(segments, "[]", drawn, whole=True, rewards=(1.0, 0.5, 0.25)).rewards == (1.0, 0.5, 0.25)
    assert join_segments(segments, "[]", drawn, whole=False).rewards == ()
