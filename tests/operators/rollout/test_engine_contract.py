"""The contract of every engine: completions, release and resumption, load, rejected requests.

Weights are in test_engine_weights.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from engine_kinds import KINDS, REPEATING, STOPS, MakeEngine, assert_equal, maker, stopping
from tiny_engines import request, run
from tiny_models import CONTEXT, VOCABULARY

from operators.rollout.engine import KV, Completion, PartialResponse, Request


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> MakeEngine:
    return maker(request.param)


@pytest.fixture(params=REPEATING)
def make_repeating(request: pytest.FixtureRequest) -> MakeEngine:
    """Of engines that draw the same tokens after an interruption."""
    return maker(request.param)


# --- completions


def test_same_seed_repeats_the_tokens_in_any_batch(make: MakeEngine) -> None:
    asked = stopping(8)
    done, other = run(make(slots=8), asked), run(make(slots=3), asked)
    for name, completion in done.items():
        assert_equal(completion, other[name])
    reseeded = run(make(slots=8), [replace(one, sampling=replace(one.sampling, seed=4)) for one in asked])
    assert any(done[name].generated.token_ids.tolist() != reseeded[name].generated.token_ids.tolist() for name in done)


# --- release and resumption


@pytest.mark.parametrize("with_kv", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_released_request_resumes_with_the_same_tokens(make_repeating: MakeEngine, steps: int, with_kv: bool) -> None:
    asked, make = stopping(8), make_repeating
    unmoved = run(make(slots=8), asked)
    source = make(slots=8)
    for one in asked:
        source.submit(one)
    finished = [completion for _ in range(steps) for completion in source.step()]
    released = source.release([one.trajectory_id for one in asked], with_kv=with_kv)
    assert with_kv or all(partial.kv is None for partial in released.values())
    assert released.keys() | {done.trajectory_id for done in finished} == unmoved.keys()
    # The tokens of an asynchronous step come with the next one.
    assert steps == 1 or any(len(partial.token_ids) > 0 for partial in released.values())
    assert source.status().running == source.status().waiting == source.status().kv_used == 0
    resumed = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id in released]
    moved = run(make(slots=3), resumed)
    for completion in [*finished, *moved.values()]:
        assert_equal(completion, unmoved[completion.trajectory_id])


def test_released_request_starts_again_at_once(make: MakeEngine) -> None:
    asked = stopping(6)
    expected, it = run(make(slots=4), asked), make(slots=4)
    for steps in (1, 2, 3):
        for one in asked:
            it.submit(one)
        done = {completion.trajectory_id for _ in range(steps) for completion in it.step()}
        assert it.release([one.trajectory_id for one in asked]).keys() == expected.keys() - done
    for name, completion in run(it, asked).items():
        assert_equal(completion, expected[name])


def test_engine_ignores_invalid_kv(make_repeating: MakeEngine) -> None:
    make = make_repeating
    one, source = request(0), make()
    unmoved = run(make(), [one])[one.trajectory_id]
    source.submit(one)
    while not len(source.generated({one.trajectory_id: 0})[one.trajectory_id].token_ids):
        source.step()
    partial = source.release([one.trajectory_id])[one.trajectory_id]
    known = len(one.prompt) + len(partial.token_ids)
    for tokens, data in ((3, b"?"), (known - 1, b"?"), (known - 1, b""), (10**6, b""), (0, b"")):
        kv = KV(tokens, memoryview(data))
        (moved,) = run(make(), [replace(one, partial=replace(partial, kv=kv))]).values()
        assert_equal(moved, unmoved)


def test_release_stops_running_and_waiting_requests_only(make: MakeEngine) -> None:
    asked = [request(i, new=20) for i in range(4)]
    it = make(slots=2)
    for one in asked:
        it.submit(one)
    early = it.step()
    held = it.status().kv_used
    released = it.release(["p0.1", "p1.0", "unknown"])
    assert 0 < it.status().kv_used < held
    assert released.keys() == {"p0.1", "p1.0"}
    assert len(released["p1.0"].token_ids) == 0
    done = run(it, [])
    assert sorted([*done, *(each.trajectory_id for each in early)]) == ["p0.0", "p0.2"]
    it.submit(asked[1])  # the engine no longer has it
    assert run(it, []).keys() == {"p0.1"}


def test_engine_completes_a_finished_partial_unchanged(make: MakeEngine) -> None:
    one = request(0, stops=STOPS)
    for tokens, reason in (([1, 3], "stop"), ([1] * 12, "length")):
        partial = PartialResponse(np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32))
        (done,) = run(make(), [replace(one, partial=partial)]).values()
        assert (done.generated.token_ids.tolist(), done.finish_reason) == (tokens, reason)


def test_engine_keeps_the_tokens_of_a_partial(make: MakeEngine) -> None:
    partial = PartialResponse(np.array([5, 5, 5], np.int32), np.full(3, -0.25, np.float32))
    (done,) = run(make(), [replace(request(0), partial=partial)]).values()
    assert done.generated.token_ids[:3].tolist() == [5, 5, 5]
    assert done.generated.logprobs[:3].tolist() == [-0.25] * 3
    assert len(done.generated.token_ids) == 12


def test_generated_returns_tokens_of_running_requests(make: MakeEngine) -> None:
    asked = stopping(6)
    whole = run(make(slots=4), asked)
    it = make(slots=4)
    for one in asked:
        it.submit(one)
    pieces: dict[str, list[int]] = {one.trajectory_id: [] for one in asked}
    done: dict[str, Completion] = {}
    while it.status().running or it.status().waiting:
        done |= {completion.trajectory_id: completion for completion in it.step()}
        gained = it.generated({name: len(piece) for name, piece in pieces.items()} | {"unknown": 0})
        assert "unknown" not in gained
        for name, partial in gained.items():
            pieces[name] += partial.token_ids.tolist()
            assert len(partial.logprobs) == len(partial.token_ids)
    assert sum(map(len, pieces.values())) > 40
    for name, piece in pieces.items():
        assert_equal(done[name], whole[name])
        assert piece == whole[name].generated.token_ids[: len(piece)].tolist()


# --- load and time


def test_status_reports_the_load(make: MakeEngine) -> None:
    it = make(slots=2)
    status = it.status()
    assert (status.running, status.waiting, status.capacity, status.kv_used) == (0, 0, 2, 0)
    assert status.kv_capacity in (2 * CONTEXT, 4 * CONTEXT)  # the second with two versions
    for i in range(3):
        it.submit(request(i, new=30))
    it.step()
    status = it.status()
    assert (status.running, status.waiting) == (2, 1)
    assert status.kv_used >= 12
    done = run(it, [])
    assert it.status().tokens_generated == sum(len(each.generated.token_ids) for each in done.values()) == 90


def test_kv_capacity_is_exceeded_by_at_most_one_round(make: MakeEngine) -> None:
    it = make(slots=6, kv_capacity=80)
    asked = stopping(9)
    for one in asked:
        it.submit(one)
    done, most = 0, 0
    while it.status().running or it.status().waiting:
        done += len(it.step())
        most = max(most, it.status().kv_used)
    assert done == 9
    assert 50 < most <= 80 + 6


def test_due_is_infinite_without_requests(make: MakeEngine) -> None:
    it = make()
    assert it.due() == math.inf
    assert list(it.step()) == []
    it.submit(request(0))
    assert 0 <= it.due() < math.inf
    run(it, [])
    assert it.due() == math.inf


# --- rejected requests


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(0, prompt=0), "the prompt is empty"),
        (request(0, prompt=CONTEXT), "leaves no room in a context of 64"),
        (replace(request(0), prompt=np.array([1, VOCABULARY])), "token 40 of the prompt is not in the vocabulary"),
        (replace(request(0), prompt=np.array([1, -1])), "token -1 of the prompt"),
        (replace(request(0), prompt=np.array([[1]])), "must be a 1-D array of integers"),
        (replace(request(0), prompt=np.array([1.0])), "must be a 1-D array of integers"),
        (replace(request(0), partial=PartialResponse(np.array([99]), np.zeros(1))), "token 99 of the partial"),
        (replace(request(0), partial=PartialResponse(np.array([1]), np.zeros(2))), "1 tokens but 2 logprobs"),
        (replace(request(0), partial=PartialResponse(np.ones(60, int), np.zeros(60))), "longer than the context"),
        (request(0, temperature=-1.0), "temperature must be"),
        (request(0, temperature=float("nan")), "temperature must be"),
        (request(0, top_p=0.0), "top_p must be"),
        (request(0, top_k=-1), "top_k must be"),
        (request(0, new=0), "max_new_tokens must be"),
        (request(0, stops=(VOCABULARY,)), "stop token 40"),
        (request(0, temperature=float("inf")), "temperature must be"),
    ],
)
def test_submit_rejects_invalid_requests(make: MakeEngine, bad: Request, message: str) -> None:
    it = make()
    with pytest.raises(ValueError, match=rf"'p0\.0'.*{message}"):
        it.submit(bad)
    assert it.status().waiting == 0


def test_submit_rejects_a_known_trajectory(make: MakeEngine) -> None:
    it = make()
    it.submit(request(0))
    with pytest.raises(ValueError, match=r"'p0\.0' is already in the engine"):
        it.submit(request(0))


def test_close_can_be_repeated(make: MakeEngine) -> None:
    it = make()
    it.submit(request(0))
    it.close()
    it.close()
