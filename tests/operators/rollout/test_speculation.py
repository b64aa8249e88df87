"""With speculation every token and logprob is the one without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kinds import STOPS, stopping
from summation_orders import sums_in_one_order
from tiny_engines import assert_same, engine, mixed, request, run, speculating
from tiny_models import CONTEXT, tiny_model

from infra.models.weights import save_weights
from operators.rollout.config import RolloutConfig
from operators.rollout.draft_index import Match
from operators.rollout.engine import Completion, Request
from operators.rollout.forward_cost import measure_forward_cost
from operators.rollout.speculation import NO_DRAFT, Acceptance, Counts
from operators.rollout.stop_strings import StoppingEngine
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import PolicyVersion


def assert_all_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert found.keys() == expected.keys()
    for name, completion in expected.items():
        assert_same(completion, found[name])


def epochs(it: TransformersEngine, asked: Sequence[Request], count: int = 2) -> list[dict[str, Completion]]:
    return [run(it, asked) for _ in range(count)]


# --- tokens and logprobs


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gpt2", "gpt_neox", "qwen2_moe"])
def test_speculation_changes_no_token(family: str) -> None:
    asked = [replace(one, sampling=replace(one.sampling, max_new_tokens=30)) for one in mixed(14)]
    expected = run(engine(family, slots=5), asked)
    it = speculating(family, slots=5)
    for found in epochs(it, asked):
        assert_all_same(found, expected)
    assert it.speculation.accepted > 150, it.speculation


@pytest.mark.parametrize("slots", [1, 3, 14])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_bit_of_a_logprob(slots: int, dtype: str) -> None:
    """Also among other rows: products of this machine's library sum in one order, whatever their number of rows."""
    if not sums_in_one_order(getattr(torch, dtype), 32, 48, 128):
        pytest.skip("matrix products of this machine depend on the number of their rows")
    asked = stopping(14)
    family = "qwen3_wide"
    expected, it = run(engine(family, slots=14, dtype=dtype), asked), speculating(family, slots=slots, dtype=dtype)
    for found in epochs(it, asked):
        for name, completion in expected.items():
            assert found[name].generated.token_ids.tolist() == completion.generated.token_ids.tolist()
            assert found[name].generated.logprobs.tolist() == completion.generated.logprobs.tolist()
    assert it.speculation.accepted > 100


def test_draft_that_ends_a_response_stops_it() -> None:
    """Texts with a stop token, a limit within a draft, and one that reaches the context."""
    asked = [*stopping(9), request(50, new=CONTEXT, prompt=6), request(51, new=7, prompt=6)]
    expected = run(engine(slots=11), asked)
    assert {each.finish_reason for each in expected.values()} == {"stop", "length"}
    it = speculating(slots=11)
    for found in epochs(it, asked):
        assert_all_same(found, expected)
    shorter = [replace(one, sampling=replace(one.sampling, max_new_tokens=5)) for one in asked]
    assert_all_same(run(it, shorter), run(engine(slots=11), shorter))


def test_draft_of_another_sample_is_accepted_as_far_as_it_agrees() -> None:
    asked = [request(i, new=40, temperature=0.4) for i in range(9)]
    expected, it = run(engine(slots=9), asked), speculating(slots=2)
    assert_all_same(run(it, asked), expected)
    counts = it.speculation
    assert 0 < counts.accepted < counts.drafted
    assert counts.rejected > 0


def test_speculation_ends_a_response_at_a_stop_string() -> None:
    def letters(token_ids: list[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    asked = [request(i, new=30) for i in range(6)]
    text = letters(run(engine(), asked)["p0.0"].generated.token_ids.tolist())
    asked = [replace(one, sampling=replace(one.sampling, stop_strings=(text[12:14],))) for one in asked]
    expected = run(StoppingEngine(engine(), letters), asked)
    assert expected["p0.0"].finish_reason == "stop"
    it = StoppingEngine(speculating(), letters)
    for _ in range(2):
        assert_all_same(run(it, asked), expected)


def test_speculation_continues_after_a_refresh(tmp_path: Path) -> None:
    asked, it, plain = stopping(9), speculating(slots=4), engine(slots=4)
    run(it, asked)
    save_weights(tiny_model(seed=1), tmp_path / "w")
    for each in (it, plain):
        each.load(tmp_path / "w", PolicyVersion(1, 1))
    assert_all_same(run(it, asked), run(plain, asked))


@pytest.mark.parametrize("with_kv", [True, False])
def test_handed_over_response_continues_with_the_same_tokens(with_kv: bool) -> None:
    asked, source, destination = stopping(9), speculating(slots=9), speculating(slots=3)
    expected = run(engine(slots=9), asked)
    run(source, asked)
    for one in asked:
        source.submit(one)
    done = {each.trajectory_id: each for _ in range(2) for each in source.step()}
    released = source.release([one.trajectory_id for one in asked], with_kv=with_kv)
    assert max(len(each.token_ids) for each in released.values()) > 2
    left = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id in released]
    assert_all_same(done | run(destination, left), expected)


def test_nonfinite_verification_is_repeated_without_a_draft() -> None:
    asked = [request(i, new=40, temperature=0.7) for i in range(12)]
    it, plain = speculating("llama", slots=6), engine("llama", slots=6)
    drawn = [set(each.generated.token_ids[:-1].tolist()) for each in run(it, asked).values()]
    prompted = set(np.concatenate([one.prompt for one in asked]).tolist())
    shares = {token: sum(token in each for each in drawn) for token in set().union(*drawn) - prompted}
    some = next(token for token, share in shares.items() if 2 < share < 10)
    for each in (it, plain):
        each.model.get_input_embeddings().weight.data[some] = torch.nan
    expected = run(plain, asked)
    reasons = [each.finish_reason for each in expected.values()]
    assert 0 < reasons.count("failed") < len(reasons)
    assert_all_same(run(it, asked), expected)


# --- when it drafts


def test_drafts_save_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    it, asked, passes = speculating(), [request(i, new=40) for i in range(6)], 0
    run(it, asked)
    for one in asked:
        it.submit(one)
    while it.status().running or it.status().waiting:
        it.step()
        passes += 1
    assert passes < 10
    assert it.status().drafted > it.status().accepted > 150


def test_no_draft_exceeds_the_kv_capacity() -> None:
    asked = [request(i, new=40) for i in range(9)]
    it = speculating(slots=9, kv_capacity=CONTEXT + 40)
    for _ in range(2):
        for one in asked:
            it.submit(one)
        while it.status().running or it.status().waiting:
            it.step()
            assert it.status().kv_used <= CONTEXT + 40 + 9


def test_many_rows_are_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.rollout.speculation.MOST_ROWS", 5)
    it, asked = speculating(slots=6), [request(i, new=20) for i in range(6)]
    epochs(it, asked)
    assert it.speculation == Counts()
    run(it, asked[:5])
    assert it.speculation.accepted > 0


def test_measured_cost_rises_with_the_tokens() -> None:
    it = engine(slots=8)
    cost = measure_forward_cost(it._own_runner, 8, CONTEXT)
    assert cost.tokens.tolist() == [1, 2, 4, 8, 16, 32, 64]
    for seconds in (cost.decode_s, cost.verify_s):
        assert (seconds > 0).all()
        assert (np.diff(seconds) >= 0).all()
    assert run(engine(slots=8, speculation=True), [request(0)])["p0.0"].finish_reason == "length"


def test_acceptance_follows_recent_drafts_of_equal_match_length() -> None:
    acceptance, short, long = Acceptance(), Match(0, 3, same_prompt=False), Match(0, 20, same_prompt=False)
    assert acceptance.of(short) == acceptance.of(long) == 0.75
    for _ in range(20):
        acceptance.observe(short, 0, 4)
        acceptance.observe(long, 8, 8)
    assert acceptance.of(short) < 0.2 < 0.95 < acceptance.of(long)
    for _ in range(2000):
        acceptance.fade()
    assert acceptance.of(short) == pytest.approx(0.75, abs=0.01)


def test_record_verified_accepts_up_to_the_first_other_token() -> None:
    rows = engine(slots=4)._scheduler.rows
    for i in range(4):
        rows.start(request(i, new=20, stops=STOPS))
    last = rows.last_token[:4].copy()
    draft = np.array([[0, 10, 11, 12], [0, 10, 11, 12], [0, 10, 3, 12], [0, 10, NO_DRAFT, NO_DRAFT]])
    draft[:, 0] = last
    drawn = np.array([[10, 11, 12, 13], [10, 9, 12, 13], [10, 3, 12, 13], [10, 30, -1, 30]])
    ended, agreed = rows.record_verified(draft, drawn, np.zeros((4, 4), np.float32))
    assert [rows.partial(row).token_ids.tolist() for row in range(4)] == [[10, 11, 12, 13], [10, 9], [10, 3], []]
    assert agreed.tolist() == [3, 1, 3, 0]
    assert {row: each.finish_reason for row, each in ended.items()} == {2: "stop"}
    assert rows.last_token[:4].tolist() == [13, 9, 3, last[3]]
    assert rows.recent(1, 4).tolist() == [*rows.requests[1].prompt[-2:], 10, 9]


def test_speculation_is_refused_for_vllm() -> None:
    options: dict[str, Any] = {"engine": "vllm", "speculation": True}
    with pytest.raises(ValueError, match="speculation requires engine 'transformers' or 'emulated', not 'vllm'"):
        RolloutConfig(**options)
