"""The timing of emulated engines, against tables and against a round-by-round simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from emulated_engines import CONTEXT, VOCABULARY, ManualClock, emulated

from operators.rollout.emulated_engine import EmulatedEngine
from operators.rollout.emulated_rows import EmulatedRows
from operators.rollout.emulation_config import EngineEmulation, LengthsConfig, RooflineConfig, SpeculationEmulation
from operators.rollout.engine import KV, Completion, PartialResponse, Request
from operators.rollout.response_lengths import open_lengths
from operators.rollout.roofline import Roofline, StepPace
from operators.rollout.scheduler import Scheduler, SchedulerConfig
from schemas.records import PolicyVersion, Sampling

FLAT = RooflineConfig(decode_ms=((1, 10.0), (2, 10.0)), decode_context=0, kv_ns=0.0, prefill_us=1000.0)
"""Each round takes 10 ms, each prefill token 1 ms."""
SHORT = LengthsConfig(p50=12, p99=40)


def request(name: str, prompt: int = 6, new: int = 20, stops: tuple[int, ...] = (), fill: int = 1) -> Request:
    return Request(name, np.full(prompt, fill, np.int32), Sampling(1.0, 1.0, 0, new, stops, 3))


def advance_to(it: EmulatedEngine, clock: ManualClock, now: float) -> list[str]:
    clock.now = now
    return [done.trajectory_id for done in it.step()]


# --- time


def test_emulated_request_ends_with_its_last_round() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT)
    it.submit(request("a", prompt=6, new=4))
    # prefill of five prompt tokens, then four rounds; the first computes the prompt's last token
    assert it.due() == pytest.approx(0.0)
    assert advance_to(it, clock, 100.0) == []
    assert it.due() == pytest.approx(0.015)  # its first token, which the replica reports
    assert advance_to(it, clock, 100.0149) == []
    assert (it.status().tokens_generated, it.take_started()) == (0, [])
    assert advance_to(it, clock, 100.0151) == []
    assert (it.status().tokens_generated, it.take_started()) == (1, ["a"])
    assert it.due() == pytest.approx(0.0299)
    assert advance_to(it, clock, 100.0449) == []
    assert advance_to(it, clock, 100.0451) == ["a"]
    assert it.due() == math.inf


def test_time_scale_applies_to_rounds_and_weight_loads() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT, time_scale=10.0, pull_s=0.5)
    it.load(None, PolicyVersion(1, 0))  # type: ignore[arg-type]
    it.submit(request("a", prompt=6, new=4))
    assert it.due() == pytest.approx(0.05)
    assert advance_to(it, clock, 100.0544) == []
    assert advance_to(it, clock, 100.0546) == ["a"]


def test_new_request_joins_the_next_round() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT)
    it.submit(request("a", prompt=31, new=1))  # a first round of 30 + 10 ms
    advance_to(it, clock, 100.01)
    it.submit(request("b", prompt=2, new=1, fill=2))
    assert it.status().running == 1
    assert advance_to(it, clock, 100.0401) == ["a"]
    assert advance_to(it, clock, 100.0509) == []
    assert advance_to(it, clock, 100.0511) == ["b"]


def test_idle_engine_starts_a_request_at_its_arrival() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT)
    advance_to(it, clock, 200.0)
    it.submit(request("a", prompt=1, new=2))
    assert advance_to(it, clock, 200.0199) == []
    assert advance_to(it, clock, 200.0201) == ["a"]


def test_round_prefill_admits_long_contexts_one_by_one() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT, round_prefill=30)
    it.load(None, PolicyVersion(1, 0))  # type: ignore[arg-type]
    for number in range(3):
        it.submit(request(f"{number}", prompt=31, new=9, fill=number + 1))
    begun = []
    for now in (100.039, 100.041, 100.081, 100.121):  # rounds of 30 ms prefill and 10 ms decode
        assert advance_to(it, clock, now) == []
        begun.append(it.take_started())
    assert begun == [[], ["0"], ["1"], ["2"]]


def test_emulated_engine_prefills_a_shared_prompt_once() -> None:
    for prompts, seconds in (((1, 1, 1), 0.010), ((1, 2, 3), 0.020)):
        clock = ManualClock()
        it = emulated(clock=clock, roofline=FLAT)
        it.load(None, PolicyVersion(1, 0))  # type: ignore[arg-type]
        for number, fill in enumerate(prompts):
            it._scheduler.add(request(f"{number}", prompt=6, new=1, fill=fill))
        assert advance_to(it, clock, 100.0 + 0.005 + seconds - 1e-4) == []
        assert len(advance_to(it, clock, 100.0 + 0.005 + seconds + 1e-4)) == 3


def test_emulated_row_reuses_the_prompt_of_a_running_row() -> None:
    rows = EmulatedRows(8, CONTEXT, VOCABULARY, open_lengths(SHORT))
    rows.start(request("a"))
    assert rows.take_prefill_tokens() == 5
    for name in "bc":
        rows.start(request(name))
    assert rows.take_prefill_tokens() == 0
    rows.remove(np.array([0, 1, 2]))
    rows.start(request("d"))
    assert rows.take_prefill_tokens() == 5
    generated = emulated(clock=ManualClock())
    generated.submit(request("e"))
    partial = generated.release(["e"])["e"]
    more = replace(partial, token_ids=np.ones(4, np.int32), logprobs=np.zeros(4, np.float32))
    rows.start(replace(request("e"), partial=more))
    assert rows.take_prefill_tokens() == 3


@pytest.mark.parametrize("seed", range(5))
def test_emulated_rows_keep_their_sums_through_changes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = EmulatedRows(8, CONTEXT, VOCABULARY, open_lengths(SHORT))
    for number in range(300):
        if rows.count and draw.random() < 0.5:
            ended = rows.advance(int(draw.integers(1, rows.first_end() + 1)))
            rows.remove(np.array([*ended], np.int64))
        elif rows.count and draw.random() < 0.3:
            rows.remove(draw.choice(rows.count, 1))
        elif rows.count < rows.slots:
            rows.start(request(f"p{number}.0", int(draw.integers(1, 9)), int(draw.integers(1, 30)), (3,)))
        here = slice(rows.count)
        assert rows.tokens == rows.length[here].sum()
        if rows.count:
            assert rows.first_end() == (rows._ends[here] - rows.generated[here]).min()


# --- provided KV


def moved(name: str, kv: int = 8, new: int = 20, fill: int = 1) -> Request:
    """A request with a prompt of 6 and a partial response of 4 tokens, and the KV of the first `kv` of them."""
    partial = PartialResponse(np.ones(4, np.int32), np.zeros(4, np.float32), KV(kv, memoryview(b"")))
    return replace(request(name, new=new, fill=fill), partial=partial)


SLOW_LINK = replace(FLAT, kv_move_us=1000.0)


def test_emulated_engine_skips_prefill_of_provided_kv() -> None:
    rows = EmulatedRows(8, CONTEXT, VOCABULARY, open_lengths(SHORT))
    rows.start(moved("a"))
    assert rows.take_prefill_tokens() == 1


def test_kv_arrivals_overlap_with_rounds() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=SLOW_LINK)
    it.submit(request("a", prompt=1, new=50))
    advance_to(it, clock, 100.0)
    for name in "bc":
        it.submit(moved(name, kv=9))  # 9 ms transfer, then it joins the round that starts at 10, 20 or 30 ms
    assert (it.status().running, it.status().waiting) == (1, 2)
    begun: dict[str, float] = {}
    while len(begun) < 3:
        assert advance_to(it, clock, clock.now + it.due() + 1e-6) == []
        begun |= dict.fromkeys(it.take_started(), clock.now - 100.0)
    assert begun == pytest.approx({"a": 0.01, "b": 0.02, "c": 0.03}, abs=1e-4)
    assert it.status().tokens_generated == 3 + 2 + 1  # no round took longer


def test_kv_arrival_during_a_jump_joins_the_next_round() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=replace(FLAT, kv_move_us=5000.0))
    it.submit(request("a", prompt=1, new=50))
    advance_to(it, clock, 100.0101)
    it.submit(moved("b", kv=9, new=6))  # arrives at 55.1 ms, so its two tokens are generated by 80 ms
    assert it.due() == pytest.approx(0.045)
    assert advance_to(it, clock, 100.205) == ["b"]
    assert it.status().tokens_generated == 20 + 2


def test_idle_engine_waits_for_a_kv_arrival() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=SLOW_LINK)
    it.submit(moved("a", kv=9, new=5))
    assert it.due() == pytest.approx(0.009)
    assert advance_to(it, clock, 100.0189) == []
    assert advance_to(it, clock, 100.0191) == ["a"]
    assert it.due() == math.inf


def test_request_in_kv_transfer_counts_as_waiting() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=SLOW_LINK)
    it.submit(moved("a"))
    with pytest.raises(ValueError, match="'a' is already in the engine"):
        it.submit(moved("a"))
    with pytest.raises(RuntimeError, match="0 requests run and 1 wait"):
        it.load(None, PolicyVersion(1, 0))  # type: ignore[arg-type]
    assert it.generated({"a": 1})["a"].token_ids.tolist() == [1, 1, 1]
    assert it.release(["a"])["a"].token_ids.tolist() == [1, 1, 1, 1]
    assert (it.status().waiting, it.due()) == (0, math.inf)
    assert advance_to(it, clock, 101.0) == []


# --- jumps


def round_by_round(asked: list[Request], config: SchedulerConfig, roofline: RooflineConfig) -> dict[str, float]:
    """The end of each request if all arrive at 0 and every round is simulated."""
    rows = EmulatedRows(config.slots, config.context, config.vocabulary, open_lengths(SHORT))
    scheduler, line = Scheduler(config, rows), Roofline(roofline)
    for one in asked:
        scheduler.add(one)
    at, ends = 0.0, {}
    while scheduler.waiting or rows.count:
        scheduler.preempt()
        scheduler.admit()
        at += line.pace(rows.count, rows.tokens, rows.take_prefill_tokens()).seconds(1)
        ended = rows.advance(1)
        ends |= {rows.requests[row].trajectory_id: at for row in ended}
        scheduler.remove_rows(ended)
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_jumps_equal_single_rounds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    asked = [
        replace(request(f"p{i}.0", int(draw.integers(1, 30)), int(draw.integers(1, 34)), (3,), int(draw.integers(4))))
        for i in range(60)
    ]
    block = int(draw.choice([1, 4, 16]))
    config = SchedulerConfig(int(draw.integers(2, 12)), CONTEXT, int(draw.integers(64, 200)), VOCABULARY, block=block)
    expected = round_by_round(asked, config, RooflineConfig())
    clock = ManualClock()
    it = EmulatedEngine(config, Roofline(RooflineConfig()), open_lengths(SHORT), clock=clock)
    for one in asked:
        it._scheduler.add(one)  # all at once: `submit` would start with the first
    looks = np.sort(draw.uniform(0, max(expected.values()) + 0.1, 40))
    before = 0.0
    for look in looks:
        for name in advance_to(it, clock, 100.0 + look):
            assert before - 1e-9 <= expected.pop(name) <= look + 1e-9
        before = look
    assert all(end > looks[-1] for end in expected.values())


def test_emulated_results_do_not_depend_on_call_frequency() -> None:
    def order(looks: np.ndarray) -> list[tuple[str, list[int]]]:
        clock = ManualClock()
        it = emulated(slots=5, kv_capacity=90, clock=clock, roofline=replace(RooflineConfig(), kv_move_us=4000.0))
        done: list[Completion] = []
        for number in range(20):
            clock.now = 100.0 + 0.02 * number
            it.submit(request(f"p{number}.0", prompt=1 + number, new=30, stops=(3,), fill=number % 7))
            it.submit(moved(f"p{number}.1", new=30, fill=number % 7))
            done += it.step()
        for look in looks:
            clock.now = 101.0 + look
            done += it.step()
        return [(each.trajectory_id, each.generated.token_ids.tolist()) for each in done]

    assert len(order(np.array([60.0]))) == 40
    assert order(np.array([60.0])) == order(np.linspace(0, 60, 2000))


def test_due_is_the_time_of_the_next_event() -> None:
    clock = ManualClock()
    it = emulated(slots=4, kv_capacity=90, clock=clock)
    for number in range(12):
        it.submit(request(f"p{number}.0", new=30, stops=(3,), fill=number))
    it.step()
    looks = finished = 0
    while it.due() < math.inf:
        clock.now += it.due() + 1e-9
        finished += len(it.step())
        looks += 1
    assert finished == 12
    assert looks <= 40  # completions and preemptions, not each of about 180 rounds


def test_status_refresh_delays_load_but_not_completions() -> None:
    clock = ManualClock()
    it = emulated(clock=clock, roofline=FLAT, status_refresh_s=0.1)
    it.submit(request("a", prompt=1, new=30))
    advance_to(it, clock, 100.0)
    advance_to(it, clock, 100.015)
    assert it.status().tokens_generated == 1
    advance_to(it, clock, 100.055)
    assert it.status().tokens_generated == 1
    advance_to(it, clock, 100.117)
    assert it.status().tokens_generated == 11
    assert advance_to(it, clock, 100.195) == []
    assert it.status().tokens_generated == 11
    it.submit(request("b", prompt=1, new=1))  # every change updates the status
    assert it.status().tokens_generated == 19
    assert advance_to(it, clock, 100.2101) == ["b"]


# --- roofline


def test_roofline_matches_the_papers_table() -> None:
    line = Roofline(RooflineConfig())
    for batch, milliseconds in RooflineConfig().decode_ms:
        assert line.pace(batch, 4096 * batch, 0).seconds(1) == pytest.approx(milliseconds * 1e-3)
    assert line.pace(24, 4096 * 24, 0).seconds(1) == pytest.approx(14e-3)
    assert line.pace(320, 4096 * 320, 0).seconds(1) == pytest.approx(43.25e-3)  # extrapolated from 128 and 256
    assert line.pace(256, 0, 0).seconds(1) == pytest.approx(37.5e-3 - 256 * 4096 * 19.6e-9)


def test_stride_keeps_the_emulated_time() -> None:
    real, fewer = Roofline(RooflineConfig()), Roofline(RooflineConfig(), stride=8)
    of_real = real.pace(64, 64 * 4096, 64 * 2048)
    of_fewer = fewer.pace(64, 64 * 512, 64 * 256)
    assert of_fewer.prefill_s == pytest.approx(of_real.prefill_s)
    assert of_fewer.seconds(100) == pytest.approx(of_real.seconds(800), rel=1e-3)


def test_speculation_shortens_rounds_by_the_accepted_tokens() -> None:
    plain, line = Roofline(RooflineConfig()), Roofline(RooflineConfig(), 1, SpeculationEmulation(1.0, 0.8))
    # A draft of 16 tokens computes like 17 requests: 4.887 tokens, (1 - 0.8^17) / 0.2, in 11.84 ms instead of 10.7.
    assert line.pace(1, 4096, 0).seconds(1) == pytest.approx(11.84e-3 / 4.887, rel=1e-3)
    assert line.pace(33, 33 * 4096, 0) == plain.pace(33, 33 * 4096, 0)
    useless = Roofline(RooflineConfig(), 1, SpeculationEmulation(0.0, 0.8))
    assert useless.pace(1, 4096, 0) == plain.pace(1, 4096, 0)
    growing = line.pace(4, 4 * 4096, 100)
    assert growing.prefill_s == plain.pace(4, 4 * 4096, 100).prefill_s
    assert growing.growth_s < plain.pace(4, 4 * 4096, 100).growth_s


def test_step_pace_rounds_is_the_inverse_of_seconds() -> None:
    draw = np.random.default_rng(0)
    for _ in range(500):
        pace = StepPace(draw.choice([0.0, 0.3]), draw.uniform(1e-3, 0.1), draw.choice([0.0, 1e-9, 1e-5]))
        budget, most = draw.uniform(0, 30), int(draw.integers(0, 2000))
        rounds = pace.rounds(budget, most)
        assert rounds <= most
        assert rounds == 0 or pace.seconds(rounds) <= budget
        assert rounds == most or pace.seconds(rounds + 1) > budget


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"decode_ms": ((1, 10.0),)}, "two rows"),
        ({"decode_ms": ((1, 10.0), (1, 12.0))}, "increasing batch"),
        ({"decode_ms": ((2, 10.0), (4, 12.0))}, "from 1"),
        ({"decode_ms": ((1, 10.0), (256, 12.0))}, "12.0 ms at batch 256 is less than its KV reads take"),
        ({"kv_ns": -1.0}, "kv_ns must be at least 0"),
    ],
)
def test_roofline_config_rejects_invalid_values(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RooflineConfig(**wrong)


def test_engine_emulation_rejects_invalid_values() -> None:
    with pytest.raises(ValueError, match="stride must be at least 1"):
        EngineEmulation(stride=0)
    with pytest.raises(ValueError, match="acceptance must be at most 1, not 2"):
        SpeculationEmulation(acceptance=2.0)
    with pytest.raises(ValueError, match="p50 must be between 1 and p99"):
        LengthsConfig(p50=20, p99=10)
