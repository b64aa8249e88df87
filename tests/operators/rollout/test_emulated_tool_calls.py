"""Tool calls of emulated responses: their times, their slots, and what happens when they move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated_engines import ManualClock, emulated

from operators.rollout.emulated_engine import EmulatedEngine
from operators.rollout.emulation_config import RooflineConfig, ToolsEmulation
from operators.rollout.engine import Completion, Request
from operators.rollout.tool_calls import ToolCalls
from schemas.records import Sampling

FLAT = RooflineConfig(decode_ms=((1, 10.0), (2, 10.0)), decode_context=0, kv_ns=0.0, prefill_us=1000.0)
"""Each round takes 10 ms, each prefill token 1 ms."""
ONE_CALL = ToolCalls(ToolsEmulation(most_calls=1, p50_s=2.0, p99_s=2.0))
"""A call of two seconds in the middle of each response."""


def request(name: str, new: int = 4) -> Request:
    """A request of `new` tokens after a prompt of one."""
    return Request(name, np.ones(1, np.int32), Sampling(1.0, 1.0, 0, new, (), 3))


def ended(it: EmulatedEngine, clock: ManualClock, now: float) -> list[str]:
    """The requests that have finished at `now`."""
    clock.now = now
    return [done.trajectory_id for done in it.step()]


def run_out(it: EmulatedEngine, clock: ManualClock) -> list[Completion]:
    """What the engine finishes until it has nothing left."""
    found: list[Completion] = []
    while (due := it.due()) < float("inf"):
        clock.now += due + 1e-6
        found += it.step()
    return found


def test_calls_are_spread_over_a_response() -> None:
    calls = ToolCalls(ToolsEmulation(most_calls=8, p50_s=10.0, p99_s=300.0))
    drawn = [calls.of(0, f"p{n}.0", 900) for n in range(2000)]
    counts = [len(each) for each in drawn]
    assert (min(counts), max(counts)) == (1, 8)
    assert np.mean(counts) == pytest.approx(4.5, abs=0.2)
    assert all(
        [call.tokens for call in each] == [900 * k // (len(each) + 1) for k in range(1, len(each) + 1)]
        for each in drawn
    )
    seconds = [call.seconds for each in drawn for call in each]
    assert np.median(seconds) == pytest.approx(10.0, rel=0.1)
    assert np.quantile(seconds, 0.99) == pytest.approx(300.0, rel=0.3)
    assert max(seconds) == 600.0
    assert calls.of(0, "p5.0", 900) == drawn[5]
    assert calls.of(0, "p5.0", 1) == []


def test_response_waits_for_its_call_and_goes_on_with_its_kv() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT, tools=ONE_CALL)
    it.submit(request("a"))
    assert ended(it, clock, 102.0399) == []  # two rounds, two seconds, two rounds: nothing is prefilled again
    assert ended(it, clock, 102.0401) == ["a"]


def test_call_leaves_its_slot_to_others() -> None:
    clock = ManualClock()
    it = emulated(slots=1, clock=clock, roofline=FLAT, tools=ONE_CALL)
    it.submit(request("a"))
    it.submit(request("b", new=1))  # too short for a call
    assert ended(it, clock, 100.05) == ["b"]
    assert (it.status().running, it.status().waiting) == (1, 0)
    assert ended(it, clock, 102.1) == ["a"]
    assert (it.status().running, it.status().waiting) == (0, 0)


def test_calls_do_not_change_tokens() -> None:
    responses = []
    for tools in (ToolCalls(ToolsEmulation(most_calls=5, p50_s=1.0, p99_s=3.0)), None):
        clock = ManualClock()
        it = emulated(clock=clock, roofline=FLAT, tools=tools)
        for number in range(12):
            it.submit(replace(request(f"p{number}.0", 30), sampling=Sampling(1.0, 1.0, 0, 30, (3,), 3)))
        done = sorted(run_out(it, clock), key=lambda each: each.trajectory_id)
        responses.append([(each.trajectory_id, each.finish_reason, [*each.generated.token_ids]) for each in done])
    assert len(responses[0]) == 12
    assert responses[0] == responses[1]


def test_moved_call_starts_again() -> None:
    clock = ManualClock()
    source = emulated(clock=clock, roofline=FLAT, tools=ONE_CALL)
    source.submit(request("a"))
    assert ended(source, clock, 101.0) == []
    partial = source.release(["a"], with_kv=True)["a"]
    assert (len(partial.token_ids), source.due()) == (2, float("inf"))
    target = emulated(clock=clock, roofline=replace(FLAT, kv_move_us=1000.0), tools=ONE_CALL)
    target.submit(replace(request("a"), partial=partial))
    assert target.status().running == 1
    assert ended(target, clock, 103.0219) == []  # the transfer of two tokens, the call, two rounds
    assert ended(target, clock, 103.0221) == ["a"]
    assert run_out(source, clock) == []


def test_released_call_can_be_submitted_at_once() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT, tools=ONE_CALL)
    it.submit(request("a"))
    assert ended(it, clock, 100.5) == []
    partial = it.release(["a"])["a"]
    it.submit(replace(request("a"), partial=replace(partial, kv=None)))
    assert ended(it, clock, 102.1) == []  # the end of the first call is forgotten
    assert ended(it, clock, 102.6) == ["a"]


def test_invalid_tools_are_refused() -> None:
    with pytest.raises(ValueError, match=r"p50_s must be at most p99_s, not 20\.0 and 10\.0"):
        ToolsEmulation(p50_s=20.0, p99_s=10.0)
    with pytest.raises(ValueError, match="most_calls must be at least 0"):
        ToolsEmulation(most_calls=-1)
