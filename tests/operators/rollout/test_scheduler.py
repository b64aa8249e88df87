from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from operators.rollout.engine import PartialResponse, Request
from operators.rollout.sampling_columns import NO_TOKEN
from operators.rollout.scheduler import Scheduler, SchedulerConfig
from operators.rollout.token_rows import TokenRows
from schemas.records import Sampling

STOP = 9


def request(name: str, prompt: int = 4, new: int = 8, generated: int = 0, last: int = 1) -> Request:
    tokens = np.full(generated, 1, np.int32)
    tokens[-1:] = last
    partial = PartialResponse(tokens, np.full(generated, -0.5, np.float32)) if generated else None
    return Request(name, np.arange(prompt, dtype=np.int32) % 8, Sampling(1.0, 1.0, 0, new, (STOP,), 0), partial)


def scheduler(slots: int = 4, context: int = 32, kv: int = 128, headroom: int = 4, **options: int) -> Scheduler:
    config = SchedulerConfig(slots, context, kv, vocabulary=10, headroom=headroom, **options)
    return Scheduler(config, TokenRows(slots, context))


def names(it: Scheduler) -> list[str]:
    return [request.trajectory_id for request in it.rows.requests]


def give(it: Scheduler, *tokens: int) -> list[tuple[str, str, list[int]]]:
    ended = it.rows.record(np.array(tokens), np.full(len(tokens), -1.0, np.float32))
    it.remove_rows(ended)
    return [(done.trajectory_id, done.finish_reason, done.generated.token_ids.tolist()) for done in ended.values()]


def test_admit_is_first_come_first_served() -> None:
    it = scheduler(slots=2)
    for name in "abc":
        it.add(request(name))
    assert it.admit() == range(2)
    assert names(it) == ["a", "b"]
    assert give(it, STOP, 1) == [("a", "stop", [STOP])]
    assert it.admit() == range(1, 2)
    assert names(it) == ["b", "c"]


def test_admit_does_not_overtake_a_large_request() -> None:
    it = scheduler(context=30, kv=30, headroom=0)
    for name, prompt in (("a", 10), ("large", 25), ("small", 2)):
        it.add(request(name, prompt=prompt))
    it.admit()
    assert names(it) == ["a"]


def test_admit_respects_round_prefill() -> None:
    it = scheduler(round_prefill=8)
    for name, prompt in (("large", 12), ("b", 5), ("c", 5), ("d", 2)):
        it.add(request(name, prompt=prompt))
    admitted = []
    for _ in range(4):
        it.admit()
        admitted.append((it.admitted, it.prefill_limited))
    assert admitted == [(["large"], True), (["b", "c"], True), (["d"], False), ([], False)]


def test_admit_leaves_headroom_for_running_rows() -> None:
    it = scheduler(context=20, kv=20, headroom=4)
    it.add(request("a", prompt=8))
    it.add(request("b", prompt=8))
    it.admit()
    assert names(it) == ["a"]  # 8 + 8 tokens fit in 20, but not with 4 more each
    assert len(it.admit()) == 0  # nor while the first runs
    short = scheduler(context=20, kv=20, headroom=4)
    for name in "ab":
        short.add(request(name, prompt=8, new=2))
    short.admit()
    assert names(short) == ["a", "b"]  # neither can grow by more than 2


def test_preempt_requeues_the_request_started_last() -> None:
    it = scheduler(slots=3, context=20, kv=20, headroom=0)
    for name in "abcd":
        it.add(request(name, prompt=6))
    it.admit()
    assert names(it) == ["a", "b", "c"]
    give(it, 1, 2, 3)
    assert it.rows.tokens == 21
    assert it.preempt() == []  # the last row is removed: no row moves
    assert names(it) == ["a", "b"]
    assert it.status(0).waiting == 2
    assert len(it.admit()) == 0  # 14 + 7 > 20: c waits, and d behind it
    assert give(it, STOP, STOP) == [("a", "stop", [1, STOP]), ("b", "stop", [2, STOP])]
    it.admit()
    assert names(it) == ["c", "d"]
    assert it.rows.partial(0).token_ids.tolist() == [3]
    assert it.rows.partial(0).logprobs.tolist() == [-1.0]


def test_scheduler_counts_whole_kv_blocks() -> None:
    it = scheduler(slots=3, context=16, kv=32, headroom=1, block=16)
    for name in "abc":
        it.add(request(name, prompt=3))
    it.admit()
    assert (names(it), it.kv_used) == (
        ["a", "b"],
        32,
    )  # three times 3 tokens would fit, three blocks of 16 do not
    assert it.status(0).kv_used == 32
    give(it, 1, 1)
    assert it.preempt() == []  # 4 tokens fit their blocks
    assert names(it) == ["a", "b"]
    with pytest.raises(ValueError, match="cannot hold one context"):
        SchedulerConfig(1, 17, 31, vocabulary=10, block=16)


def test_preempted_requests_keep_their_order() -> None:
    it = scheduler(slots=4, context=24, kv=24, headroom=0)
    for name in "abcd":
        it.add(request(name, prompt=6))
    it.admit()
    for _ in range(6):
        give(it, *[1] * it.rows.count)
        it.preempt()
    assert names(it) == ["a", "b"]
    give(it, STOP, STOP)
    it.admit()
    assert names(it)[0] == "c"


def test_single_request_may_fill_the_kv() -> None:
    it = scheduler(context=16, kv=16)
    it.add(request("a", prompt=4, new=100))
    it.admit()
    done = [give(it, 1) for _ in range(12)]
    assert done[:-1] == [[]] * 11
    assert done[-1] == [("a", "length", [1] * 12)]


def test_rows_end_by_stop_token_limit_or_failure() -> None:
    it = scheduler()
    for name in ("stops", "full", "broken", "goes on"):
        it.add(request(name, new=2))
    it.admit()
    assert give(it, 1, 1, 1, 1) == []
    assert give(it, STOP, 2, NO_TOKEN, STOP - 1) == [
        ("stops", "stop", [1, STOP]),
        ("full", "length", [1, 2]),
        ("broken", "failed", [1]),
        ("goes on", "length", [1, 8]),
    ]


def test_reused_row_has_no_old_stop_tokens() -> None:
    it = scheduler(slots=1)
    it.add(request("stops"))
    plain = request("goes on")
    it.add(replace(plain, sampling=replace(plain.sampling, stop_token_ids=())))
    it.admit()
    assert give(it, STOP) == [("stops", "stop", [STOP])]
    it.admit()
    assert give(it, STOP) == []


def test_remove_moves_the_last_rows_into_free_rows() -> None:
    it = scheduler(slots=5)
    for name, prompt in zip("abcde", (3, 4, 5, 6, 7), strict=True):
        it.add(request(name, prompt=prompt, generated=2))
    it.admit()
    lengths = {request.trajectory_id: int(it.rows.length[row]) for row, request in enumerate(it.rows.requests)}
    keys = dict(zip(names(it), it.rows.keys.tolist(), strict=True))
    released, moves = it.release(["a", "c", "unknown"])
    assert set(released) == {"a", "c"}
    assert moves == [(3, 0, 8), (4, 2, 9)]
    assert names(it) == ["d", "b", "e"]
    assert [lengths[name] for name in names(it)] == it.rows.length[:3].tolist()
    assert [keys[name] for name in names(it)] == it.rows.keys.tolist()
    assert it.rows.known_tokens(0).tolist() == [0, 1, 2, 3, 4, 5, 1, 1]


def test_release_returns_waiting_and_finished_requests() -> None:
    it = scheduler(slots=1)
    for one in (request("runs"), request("waits"), request("resumes", generated=3), request("ended", generated=8)):
        it.add(one)
    it.admit()
    give(it, 7)
    released, _ = it.release(["runs", "waits", "resumes", "ended"])
    lengths = {name: partial.token_ids.tolist() for name, partial in released.items()}
    assert lengths == {"runs": [7], "waits": [], "resumes": [1, 1, 1], "ended": [1] * 8}
    assert it.idle


@pytest.mark.parametrize(
    ("partial", "reason"),
    [
        (request("a", generated=3, last=STOP), "stop"),
        (request("a", generated=8), "length"),
        (request("a", prompt=30, generated=2), "length"),
    ],
)
def test_finished_partial_completes_unchanged(partial: Request, reason: str) -> None:
    it = scheduler()
    it.add(partial)
    assert not it.idle
    (done,) = it.take_finished()
    assert partial.partial is not None
    assert (done.finish_reason, done.generated) == (reason, partial.partial)
    assert it.idle
    assert len(it.admit()) == 0


def test_add_rejects_a_known_trajectory() -> None:
    it = scheduler(slots=1)
    for one in (request("runs"), request("waits"), request("ended", generated=8)):
        it.add(one)
    it.admit()
    for name in ("runs", "waits", "ended"):
        with pytest.raises(ValueError, match=f"'{name}' is already in the engine"):
            it.add(request(name))
    give(it, STOP)
    it.add(request("runs"))


@pytest.mark.parametrize("config", [(0, 32, 128, 10), (4, 1, 128, 10), (4, 32, 31, 10), (4, 32, 128, 0)])
def test_scheduler_config_rejects_invalid_values(config: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"needs at least 1 slot|cannot hold one context"):
        SchedulerConfig(*config)
