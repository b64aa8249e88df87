"""Episodes on the transformers engine: turns, observations, and their independence from moves and restarts."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factories import prompt, version
from scripted_engine import ScriptedWeights
from tiny_engines import engine, plain_logprobs
from tiny_models import VOCABULARY, tiny_model

from infra.models.chat import MessageFrame
from operators.io.repartition import Placed
from operators.rollout.engine import KV, Completion, PartialResponse, Request
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.pool import EnvironmentPool
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.replica import Replica
from operators.rollout.running_request import request_of, response_of
from operators.rollout.turns import turn_ranges
from schemas.columns import flags, floats, token_ids
from schemas.records import Assignment, Episode, Progress, Release, Response, Sampling, Trajectory

HERE = Path(__file__).with_name("fake_environments.py")
LETTERS = "0123456789[]():<>.ABCDEFGHIJKLMNOPQRSTUV"
STOP = 39
SPECS = {
    "echo": {"name": "Echo", "turn_tokens": 5},
    "long": {"name": "Echo", "options": {"turns": 30}, "turn_tokens": 3, "turns": 30},
    "few": {"name": "Echo", "options": {"turns": 30}, "turn_tokens": 3, "turns": 2},
    "free": {"name": "Echo"},
    "stopped": {"name": "Stopped", "turn_tokens": 12},
    "waits": {"name": "Waits", "turn_tokens": 3},
    "nothing": {"name": "Faulty", "options": {"how": "returns an empty observation"}, "turn_tokens": 3},
    "raises": {"name": "Faulty", "options": {"how": "raises"}, "turn_tokens": 3},
    "nondeterministic": {"name": "Nondeterministic", "turn_tokens": 3, "workers": 1},
}


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


OpenPools = Callable[..., dict[str, EnvironmentPool]]


@pytest.fixture(scope="module")
def pools() -> Iterator[OpenPools]:
    opened: dict[str, EnvironmentPool] = {}

    def open_pools(*names: str) -> dict[str, EnvironmentPool]:
        for name in set(names) - opened.keys():
            fields: dict[str, Any] = {"label": name, **SPECS[name]}
            opened[name] = EnvironmentPool(EnvironmentSpec(**(fields | {"name": f"{HERE}:{fields['name']}"})))
        return {name: opened[name] for name in names}

    yield open_pools
    for pool in opened.values():
        pool.close()


def asked(number: int, environment: str, new: int = 40, stops: tuple[int, ...] = (), **changes: Any) -> Any:
    sampling = Sampling(1.0, 1.0, 0, max_new_tokens=new, stop_token_ids=stops, seed=3)
    tokens = np.random.default_rng(number).integers(0, VOCABULARY, 4)
    return prompt(number, 1, token_ids=token_ids(tokens), sampling=sampling, environment=environment, **changes)


def request(of: Any, partial: Response | None = None) -> Request:
    return request_of(Assignment(of, 0, 1, 1, 0, 1, None, partial, 0))


def episodes(pools: Mapping[str, EnvironmentPool], slots: int = 8) -> EpisodeEngine:
    return EpisodeEngine(engine(slots=slots, version=version(0)), pools, encode, decode)


def run(it: EpisodeEngine) -> dict[str, Completion]:
    done = {}
    while it.status().running or it.status().waiting:
        for completion in it.step():
            done[completion.trajectory_id] = completion
    return done


def test_episode_alternates_turns_and_observations(pools: OpenPools) -> None:
    it = episodes(pools("echo"))
    one = request(asked(7, "echo"))
    it.submit(one)
    done = run(it)["p7.0"]
    tokens, mask = done.generated.token_ids, done.generated.drawn
    turns = turn_ranges(mask)
    texts = [decode(tokens[turn.start : turn.stop].tolist()) for turn in turns]
    assert [len(text) for text in texts] == [5, 5, 5]
    heard = [sum(map(ord, "".join(texts[: i + 1]))) % 1000 for i in range(2)]
    assert decode(tokens.tolist()) == f"[7]{texts[0]}(1:{heard[0]}){texts[1]}(2:{heard[1]}){texts[2]}"
    assert (done.finish_reason, done.episode) == ("stop", Episode((0.25, 0.5, 0.75), "done"))
    (conversation,) = done.conversations
    said = [(each["role"], each["content"]) for each in json.loads(conversation.messages)]
    assert said[0] == ("user", asked(7, "echo").text)
    observed = ("[7]", f"(1:{heard[0]})", f"(2:{heard[1]})")
    between = [[("user", text), ("assistant", turn)] for text, turn in zip(observed, texts, strict=True)]
    assert said[1:] == [each for pair in between for each in pair]
    assert (done.generated.logprobs[~mask] == 0).all()
    plain = plain_logprobs(tiny_model(), one, done.generated)
    assert np.abs(done.generated.logprobs - plain)[mask].max() < 1e-4


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", ["echo", "stopped"])
def test_kept_kv_reduces_prefill_and_keeps_tokens(
    pools: OpenPools, name: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = {}
    done = {}
    (pool,) = pools(name).values()
    for megabytes in (0, 1):
        monkeypatch.setattr(pool, "spec", replace(pool.spec, kv_megabytes=megabytes))
        inner = engine(slots=3, version=version(0), direct=direct)
        it = EpisodeEngine(inner, {name: pool}, encode, decode)
        counted = computed[megabytes] = []
        runner = inner._runner
        for method in ("prefill", "decode"):
            monkeypatch.setattr(runner, method, counting(getattr(runner, method), counted))
        for number in range(6):
            it.submit(request(asked(number, name, stops=(STOP,))))
        done[megabytes] = run(it)
        assert not any(each.generated.kv for each in done[megabytes].values() if each.finish_reason == "failed")
    for each, other in ((done[0][name], done[1][name]) for name in done[0]):
        assert each.generated.token_ids.tolist() == other.generated.token_ids.tolist()
        assert np.abs(each.generated.logprobs - other.generated.logprobs).max() < 1e-4
        assert each.episode == other.episode
    assert sum(computed[1]) < 0.8 * sum(computed[0])


def counting(method: Callable[..., Any], counted: list[int]) -> Callable[..., Any]:
    """Wraps `method` of a runner to count the tokens of its prefill blocks."""

    def called(*arguments: Any) -> Any:
        counted.extend(block.token_ids.size for block in (arguments[-1] if isinstance(arguments[-1], list) else ()))
        return method(*arguments)

    return called


def test_episode_kv_beyond_its_memory_is_freed(pools: OpenPools, monkeypatch: pytest.MonkeyPatch) -> None:
    (pool,) = pools("waits").values()
    monkeypatch.setattr(pool, "spec", replace(pool.spec, kv_megabytes=1))
    it = EpisodeEngine(engine(version=version(0)), {"waits": pool}, encode, decode)
    for number in (20, 21):  # which no other test plays in this pool
        it.submit(request(asked(number, "waits", reference='{"file": "/nowhere"}')))
    playing = list(it._active.values())
    kv = KV(1, memoryview(bytes(700_000)))
    assert it._has_memory_for(playing[0], kv)
    playing[0].known = replace(playing[0].known, kv=kv)
    assert not it._has_memory_for(playing[1], kv)
    assert it._has_memory_for(playing[1], KV(1, memoryview(bytes(300_000))))
    assert it.release(["p20.0"], with_kv=True)["p20.0"].kv is None
    it.release(["p21.0"])


@pytest.mark.parametrize("stops", [(), (STOP,), tuple(range(20, VOCABULARY))])
def test_observations_are_framed_as_messages(pools: OpenPools, stops: tuple[int, ...]) -> None:
    """The frame ends a turn that has no stop token; a replay gives the same tokens."""
    frame = MessageFrame((STOP,), (10, 11), (12, 13))
    it = EpisodeEngine(engine(version=version(0)), pools("echo"), encode, decode, {"echo": frame})
    asked_for = asked(7, "echo", new=60, stops=stops)
    it.submit(request(asked_for))
    done = run(it)["p7.0"].generated
    assert it.status().running == 0
    tokens, turns = done.token_ids.tolist(), turn_ranges(done.drawn)
    assert len(turns) == 3
    for number, turn in enumerate(turns):
        before = tokens[(turns[number - 1].stop if number else 0) : turn.start]
        ended = number > 0 and tokens[turns[number - 1].stop - 1] in stops
        assert before[:3] == [10, 11, *encode("(" if number else "[")] if ended else [STOP, 10, 11]
        assert before[-2:] == [12, 13]
    mask = done.drawn
    known = Response(
        token_ids(tokens[: turns[1].stop]), floats(done.logprobs[: turns[1].stop]), flags(mask[: turns[1].stop])
    )
    again = EpisodeEngine(engine(version=version(0)), pools("echo"), encode, decode, {"echo": frame})
    again.submit(request(asked_for, known))
    assert run(again)["p7.0"].generated.token_ids.tolist() == tokens


@pytest.mark.parametrize(
    ("name", "new", "stops", "ending", "reason"),
    [
        ("few", 40, (), "turns", "length"),
        ("long", 20, (), "length", "length"),
        ("free", 20, (), "length", "length"),
        ("echo", 40, tuple(range(VOCABULARY)), "failed", "failed"),
    ],
)
def test_episode_reports_why_it_ended(
    pools: OpenPools, name: str, new: int, stops: tuple[int, ...], ending: str, reason: str
) -> None:
    it = episodes(pools(name))
    it.submit(request(asked(1, name, new, stops)))
    done = run(it)["p1.0"]
    assert done.episode is not None
    assert (done.episode.ending, done.finish_reason) == (ending, reason)
    assert len(done.generated.token_ids) <= new
    assert len(done.episode.rewards) == len(turn_ranges(done.generated.drawn))
    assert (done.error or "") == ("the observation ends with a stop token" if reason == "failed" else "")


def test_turn_ends_with_a_stop_string_or_token(pools: OpenPools) -> None:
    it = episodes(pools("stopped"), slots=16)
    for number in range(16):
        it.submit(request(asked(number, "stopped", 55, stops=(STOP,))))
    ends = []
    for done in run(it).values():
        tokens = done.generated.token_ids
        for turn in turn_ranges(done.generated.drawn):
            text = decode(tokens[turn.start : turn.stop].tolist())
            assert not set(text[:-1]) & set("AKZV")
            ends.append(text[-1] in "AKV")
            assert ends[-1] or len(text) == 12 or turn.stop == 55
    assert sum(ends) > 10


@pytest.mark.parametrize(
    ("name", "error"),
    [("raises", "KeyError: 'no such thing'"), ("nothing", "the observation is empty, but the episode is not done")],
)
def test_faulty_environment_fails_only_its_episodes(pools: OpenPools, name: str, error: str) -> None:
    it = episodes(pools(name, "echo"))
    for number, environment in enumerate((name, "echo", "")):
        it.submit(request(asked(number, environment, 24)))
    done = run(it)
    assert done["p0.0"].finish_reason == "failed"
    assert error in (done["p0.0"].error or "")
    assert len(done["p0.0"].generated.token_ids) == 4  # the first observation and a turn
    assert (done["p1.0"].episode or Episode((), "failed")).ending == "length"
    assert (done["p2.0"].finish_reason, done["p2.0"].episode) == ("length", None)


def test_submit_rejects_an_unknown_environment(pools: OpenPools) -> None:
    it = episodes(pools("echo"))
    with pytest.raises(ValueError, match=r"no environment 'ecco': rollout\.environments has \['echo'\]"):
        it.submit(request(asked(0, "ecco")))
    it.submit(request(asked(0, "echo")))
    with pytest.raises(ValueError, match="is already in the engine"):
        it.submit(request(asked(0, "echo")))
    with pytest.raises(RuntimeError, match="while 1 requests run"):
        it.load(Path(), version(1))


def test_slow_environment_does_not_delay_other_requests(pools: OpenPools, tmp_path: Path) -> None:
    it, answer = episodes(pools("waits", "echo"), slots=1), tmp_path / "answer"
    it.submit(request(asked(0, "waits", reference=f'{{"file": "{answer}"}}')))
    it.submit(request(asked(1, "echo")))
    it.submit(request(asked(2, "")))
    order: list[str] = []
    while len(order) < 2 or it.generated({"p0.0": 0})["p0.0"].drawn.sum() < 3:
        order += [completion.trajectory_id for completion in it.step()]
    assert set(order) == {"p1.0", "p2.0"}
    assert (it.status().running, it.status().waiting) == (1, 0)
    answer.touch()
    assert run(it).keys() == {"p0.0"}


# --- moves and restarts

COUNT = 40


def replica(index: int, pools: Mapping[str, EnvironmentPool]) -> Replica:
    weights = ScriptedWeights()
    weights.add(version(0))
    made = Replica(index, 1, episodes(pools, slots=COUNT), weights, decode, lambda: 0)
    made.announce(version(0))
    return made


def all_of(
    pools: Mapping[str, EnvironmentPool], *, moves: bool = False, kills: bool = False
) -> tuple[dict[str, Trajectory], Counter[int]]:
    """All trajectories by id, and the number of moves by turn. With `moves` trajectories are handed over; with `kills`
    those of a killed replica resume from its last progress."""
    rng, lease = random.Random(5), 1
    replicas = [replica(index, pools) for index in range(2)]
    owners: dict[str, Assignment] = {}
    reported: dict[str, PartialResponse] = {}
    done: dict[str, Trajectory] = {}
    elsewhere: Counter[int] = Counter()
    dying = [1, 2, 3, 3, 2, 1]  # the next kill hits a replica with progress in this turn
    for number in range(COUNT):
        given = Assignment(
            asked(number, ("echo", "stopped")[number % 2], 55, (STOP,)), 0, 1, 1, number % 2, 1, None, None, 0
        )
        owners[given.trajectory_id] = given
        replicas[number % 2].accept(given)
    while len(done) < COUNT:
        for each in replicas:
            for event in each.step():
                if isinstance(event, Trajectory):
                    done[event.trajectory_id] = event
                    del owners[event.trajectory_id]
        source = rng.randrange(2)
        if moves and lease < 40 and rng.random() < 0.3:
            here = [name for name, owner in owners.items() if owner.replica == source]
            lease += 1
            leaving = rng.sample(here, rng.randint(0, len(here)))
            order = Release("1-1.1", tuple(leaving), (lease,) * len(leaving), 1 - source, 1, source, 1)
            for event in replicas[source].hand_over(order):
                if isinstance(event, Placed):
                    given = event.assignment
                    replicas[1 - source].accept(given)
                    owners[given.trajectory_id] = given
                    elsewhere[_turns(given)] += 1
        for event in replicas[source].report_progress() if kills and rng.random() < 0.3 else ():
            assert isinstance(event, Progress)
            before = reported.get(event.trajectory_id)
            gained = request_of(replace(owners[event.trajectory_id], partial=event.gained)).partial
            assert gained is not None
            assert event.start == (0 if before is None else len(before.token_ids))
            reported[event.trajectory_id] = gained if before is None else _joined(before, gained)
        known = {
            _turns(replace(owner, partial=response_of(reported[name])))
            for name, owner in owners.items()
            if name in reported and owner.replica == source
        }
        if kills and dying and dying[0] in known:
            dying.pop(0)
            replicas[source].engine.close()
            replicas[source] = replica(source, pools)
            for name, owner in [(name, owner) for name, owner in owners.items() if owner.replica == source]:
                lease += 1
                partial = response_of(reported[name]) if name in reported else None
                pinned = version(0) if partial is not None else None
                owners[name] = replace(owner, lease=lease, partial=partial, policy_version=pinned)
                replicas[source].accept(owners[name])
                elsewhere[_turns(owners[name])] += 1
    return done, elsewhere


def _turns(of: Assignment) -> int:
    partial = request_of(of).partial
    return 0 if partial is None else len(turn_ranges(partial.drawn))


def _joined(one: PartialResponse, other: PartialResponse) -> PartialResponse:
    parts = [(one.token_ids, other.token_ids), (one.logprobs, other.logprobs), (one.drawn, other.drawn)]
    token_ids, logprobs, mask = map(np.concatenate, parts)
    return PartialResponse(token_ids, logprobs, loss_mask=mask)


@pytest.fixture(scope="module")
def unmoved(pools: OpenPools) -> dict[str, Trajectory]:
    return all_of(pools("echo", "stopped"))[0]


@pytest.mark.parametrize("what", ["moves", "kills"])
def test_episode_is_unchanged_by_moves_and_kills(pools: OpenPools, unmoved: dict[str, Trajectory], what: str) -> None:
    done, elsewhere = all_of(pools("echo", "stopped"), **{what: True})
    assert all(elsewhere[turn] for turn in (1, 2, 3)), elsewhere
    assert done.keys() == unmoved.keys()
    for name, trajectory in done.items():
        one, other = trajectory.response, unmoved[name].response
        assert one.token_ids == other.token_ids
        assert one.loss_mask == other.loss_mask
        assert np.abs(one.logprobs.to_numpy() - other.logprobs.to_numpy()).max() < 1e-4
        assert trajectory.episode == unmoved[name].episode
        assert trajectory.version_spans == unmoved[name].version_spans
    assert sum(len((each.episode or Episode((), "failed")).rewards) == 3 for each in done.values()) > COUNT // 2


def test_nondeterministic_environment_fails_on_replay(pools: OpenPools) -> None:
    one = request(asked(3, "nondeterministic"))
    first = episodes(pools("nondeterministic"))
    first.submit(one)
    while first.generated({"p3.0": 0})["p3.0"].drawn.sum() < 4:  # into its second turn
        first.step()
    known = first.release(["p3.0"])["p3.0"]
    elsewhere = EnvironmentPool(pools("nondeterministic")["nondeterministic"].spec)
    try:
        second = episodes({"nondeterministic": elsewhere})
        second.submit(replace(one, partial=known))
        done = run(second)["p3.0"]
    finally:
        elsewhere.close()
    assert done.finish_reason == "failed"
    assert "not deterministic: on replay observation 1 differs" in (done.error or "")
