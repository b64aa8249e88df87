from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record_factories import prompt, version
from tiny_engines import OnDisk, assert_same, engine, mixed, plain_logprobs, request, run
from tiny_models import CONTEXT, FAMILIES, MIXTURES, tiny_model

from infra.models.weights import save_weights
from operators.rollout.engine import Completion, PartialResponse, Request
from operators.rollout.replica import Replica
from operators.rollout.runner import RunnerLost
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import Assignment, Sampling, Trajectory

# --- tokens and logprobs


def test_interrupted_request_resumes_under_newer_weights(tmp_path: Path) -> None:
    save_weights(tiny_model(), tmp_path / "weights")
    weights = OnDisk(tmp_path / "weights")
    replica = Replica(0, 1, engine(slots=8), weights, str, lambda: 0, interrupts=True)
    replica.announce(version(0))
    asked = [prompt(number, 1, sampling=Sampling(1.0, 1.0, 0, 20, (), 3)) for number in range(6)]
    for each in asked:
        replica.accept(Assignment(each, 0, 1, 1, 0, 1, None, None, 0))
    events = [event for _ in range(7) for event in replica.step()]
    save_weights(tiny_model(seed=1), tmp_path / "weights")
    weights.held.append(version(1))
    replica.announce(version(1))
    while replica.busy():
        events += replica.step()
    done = [event for event in events if isinstance(event, Trajectory)]
    assert len(done) == 6
    for each in done:
        spans = each.version_spans
        assert [span.version for span in spans] == [version(0), version(1)]
        generated = PartialResponse(each.response.token_ids.to_numpy(), each.response.logprobs.to_numpy())
        one = Request(each.trajectory_id, each.prompt.token_ids.to_numpy(), each.prompt.sampling)
        before = plain_logprobs(tiny_model(), one, generated)[: spans[0].length]
        after = plain_logprobs(tiny_model(seed=1), one, generated)[spans[0].length :]
        assert np.abs(np.concatenate([before, after]) - generated.logprobs).max() < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_logprobs_match_a_plain_forward(family: str) -> None:
    reference = tiny_model(family)
    it = engine(family, slots=5)
    assert it.direct is (family in FAMILIES and FAMILIES[family][1])
    requests = mixed(14)  # all temperatures, top-k and top-p
    done = run(it, requests)
    assert len(done) == 14
    for one in requests:
        generated = done[one.trajectory_id].generated
        assert len(generated.token_ids) == one.sampling.max_new_tokens
        assert np.abs(plain_logprobs(reference, one, generated) - generated.logprobs).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gpt2"])
def test_tokens_are_equal_alone_batched_and_resumed(family: str) -> None:
    requests = mixed(14)
    together = run(engine(family, slots=5), requests)
    everyone = run(engine(family, slots=14), requests)
    one_slot = engine(family, slots=1)
    cut = engine(family, slots=9)
    resumed = []
    for i, one in enumerate(requests):
        assert_same(together[one.trajectory_id], everyone[one.trajectory_id])
        assert_same(together[one.trajectory_id], run(one_slot, [one])[one.trajectory_id])
        generated = together[one.trajectory_id].generated
        length = (i * 5) % len(generated.token_ids)
        partial = PartialResponse(generated.token_ids[:length], generated.logprobs[:length])
        resumed.append(replace(one, partial=partial))
    for name, completion in run(cut, resumed).items():
        assert_same(together[name], completion)


@pytest.mark.parametrize("direct", [True, False])
def test_half_precision_is_as_exact_as_a_plain_forward(direct: bool) -> None:
    reference, owned = (tiny_model().to(torch.bfloat16) for _ in range(2))
    exact = tiny_model().to(torch.bfloat16).float()
    it = TransformersEngine(owned, slots=5, direct=direct)
    assert it.direct is direct
    requests = [request(i, new=20, prompt=2 + i) for i in range(9)]
    done = run(it, requests)
    ours, plain = [], []
    for one in requests:
        generated = done[one.trajectory_id].generated
        wanted = plain_logprobs(exact, one, generated)
        ours.append(generated.logprobs - wanted)
        plain.append(plain_logprobs(reference, one, generated) - wanted)
    # bfloat16 differs from float32; the engine must not differ more.
    assert np.abs(np.concatenate(ours)).mean() < 1.5 * np.abs(np.concatenate(plain)).mean()


def test_direct_and_forward_runner_draw_equal_tokens() -> None:
    direct, forward = engine(slots=5), engine(slots=5, direct=False)
    assert (direct.direct, forward.direct) == (True, False)
    ours, theirs = run(direct, mixed(14)), run(forward, mixed(14))
    for name, completion in ours.items():
        assert_same(completion, theirs[name])


def test_sorted_rows_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.rollout.attention_chunks._CALL_COST", 1)
    monkeypatch.setattr("operators.rollout.attention_chunks._COPY_COST", 0)
    it = engine(slots=6)
    permuted = []
    permute = it._kv.permute
    monkeypatch.setattr(it._kv, "permute", lambda order, width: permuted.append(len(order)) or permute(order, width))
    in_order = run(it, mixed(60))
    assert len(permuted) > 20
    monkeypatch.undo()
    for name, completion in run(engine(slots=6), mixed(60)).items():
        assert_same(completion, in_order[name])


def test_long_prefill_is_split_into_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.rollout.transformers_engine.MAX_PREFILL_TOKENS", 8)
    it = engine(slots=14)
    passes = []
    prefill = it._runner.prefill
    monkeypatch.setattr(it._runner, "prefill", lambda blocks: passes.append(blocks) or prefill(blocks))
    split = run(it, mixed(14))
    assert len(passes) == 2
    for name, completion in run(engine(slots=14), mixed(14)).items():
        assert_same(completion, split[name])


def test_greedy_reports_the_plain_logprob() -> None:
    reference = tiny_model()
    one = request(0, temperature=0.0)
    generated = run(engine(), [one])[one.trajectory_id].generated
    ids = torch.from_numpy(np.concatenate([one.prompt, generated.token_ids]).astype(np.int64))[None]
    with torch.inference_mode():
        likeliest = reference(input_ids=ids).logits[0, len(one.prompt) - 1 : -1].argmax(-1)
    assert generated.token_ids.tolist() == likeliest.tolist()
    assert np.abs(plain_logprobs(reference, one, generated) - generated.logprobs).max() < 1e-4


def test_stop_token_is_the_last_token() -> None:
    free = run(engine(), [request(i, new=30) for i in range(9)])
    stops = (4, 11, 23)
    ended = run(engine(), [request(i, new=30, stops=stops) for i in range(9)])
    reasons = set()
    for name, completion in free.items():
        tokens = completion.generated.token_ids.tolist()
        first = next((i for i, token in enumerate(tokens) if token in stops), None)
        assert ended[name].generated.token_ids.tolist() == (tokens if first is None else tokens[: first + 1])
        assert ended[name].finish_reason == ("length" if first is None else "stop")
        reasons.add(ended[name].finish_reason)
    assert reasons == {"stop", "length"}


def test_joining_request_keeps_its_sampling() -> None:
    it = engine()
    requests = [request(0), request(1, temperature=0.0), request(3, top_k=2)]
    joining: dict[str, Completion] = {}
    for one in requests:
        it.submit(one)
        joining |= {completion.trajectory_id: completion for completion in it.step()}
    joining |= run(it, [])
    for name, completion in run(engine(), requests).items():
        assert_same(completion, joining[name])


def test_context_limits_a_response() -> None:
    done = run(engine(context=20), [request(0, new=100, prompt=6)])["p0.0"]
    assert (len(done.generated.token_ids), done.finish_reason) == (14, "length")


def test_non_finite_logits_fail_one_trajectory() -> None:
    it = engine(slots=2)
    others = [
        request(1),
        request(9, prompt=20),
    ]  # reuses the failed row; widens its attention
    expected = run(engine(slots=2), others)
    embedding = it.model.get_input_embeddings().weight
    one = request(5, prompt=20)
    healthy = embedding.detach().clone()
    embedding.data[int(one.prompt[0])] = torch.nan
    failed = run(it, [one])[one.trajectory_id]
    assert failed.finish_reason == "failed"
    assert "not finite" in str(failed.error)
    assert len(failed.generated.token_ids) == 0
    embedding.data.copy_(healthy)
    for name, completion in run(it, others).items():
        assert_same(completion, expected[name])


# --- scheduling and KV


def test_free_slot_is_refilled_in_the_next_step() -> None:
    it = engine(slots=3)
    for i, new in enumerate((2, 9, 9, 4, 4)):
        it.submit(request(i, new=new))
    running = []
    while it.status().running or it.status().waiting:
        it.step()
        running.append((it.status().running, it.status().waiting))
    # request 3 runs in steps 3-6, in the slot of request 0; request 4 in steps 7-10, in that of request 3
    assert running == [(3, 2), (2, 2), (3, 1), (3, 1), (3, 1), (2, 1), (3, 0), (3, 0), (1, 0), (0, 0)]


def test_prompt_of_a_running_row_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine(slots=3)
    blocks: list[int] = []
    decode = it._runner.decode

    def counted(step: Any, prefill: Sequence[Any] = ()) -> torch.Tensor:
        blocks.append(sum(block.token_ids.size for block in prefill))
        return decode(step, prefill)

    monkeypatch.setattr(it._runner, "decode", counted)
    it.submit(request(0))
    it.step()
    it.submit(request(1))
    it.submit(request(3))
    it.step()
    assert blocks == [5, 5]  # p0.1 copies the prompt of p0.0; p1.0 has another


def test_kv_capacity_is_not_exceeded() -> None:
    requests = mixed(14)
    roomy = run(engine(slots=14), requests)
    it = engine(slots=14, kv_capacity=CONTEXT + 6)
    for one in requests:
        it.submit(one)
    tight: dict[str, Completion] = {}
    while it.status().running or it.status().waiting:
        before = it.status()
        assert before.kv_used <= before.kv_capacity + before.running  # the newest tokens are not stored yet
        tight |= {completion.trajectory_id: completion for completion in it.step()}
        held = sum(int(length) - 1 for length in it._scheduler.rows.length[: it.status().running])
        assert held <= it.status().kv_capacity
    for name, completion in roomy.items():
        assert_same(completion, tight[name])


def test_status_counts_requests_and_tokens() -> None:
    it = engine(slots=2, context=32)
    for i in range(3):
        it.submit(request(i, new=4, prompt=5))
    it.step()
    status = it.status()
    assert (status.running, status.waiting, status.capacity) == (2, 1, 2)
    assert (status.kv_used, status.kv_capacity, status.tokens_generated) == (2 * 6, 64, 2)
    run(it, [])
    assert it.status().tokens_generated == 12


def test_empty_engine_steps_without_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine()
    monkeypatch.setattr(it, "_runner", None)  # any use of the model would raise
    assert list(it.step()) == []


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("with_kv", [True, False])
def test_provided_kv_is_not_recomputed(direct: bool, with_kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, source, it = mixed(6), engine(direct=direct), engine(direct=direct)
    for one in asked:
        source.submit(one)
    for _ in range(2):
        source.step()
    released = source.release([one.trajectory_id for one in asked], with_kv=with_kv)
    computed, decode = [], it._runner.decode
    monkeypatch.setattr(it._runner, "decode", lambda step, blocks: computed.extend(blocks) or decode(step, blocks))
    run(it, [replace(one, partial=released[one.trajectory_id]) for one in asked])
    assert bool(computed) is not with_kv
    assert it._provided_kv == {}


def test_release_returns_all_generated_tokens() -> None:
    whole = run(engine(), [request(i) for i in range(4)])
    it = engine(slots=3)
    for i in range(4):
        it.submit(request(i))
    for _ in range(5):
        it.step()
    released = it.release(["p0.0", "p1.0", "nobody"])
    assert set(released) == {"p0.0", "p1.0"}
    assert released["p0.0"].token_ids.tolist() == whole["p0.0"].generated.token_ids[:5].tolist()
    assert released["p0.0"].token_ids.dtype == np.int32
    assert np.abs(released["p0.0"].logprobs - whole["p0.0"].generated.logprobs[:5]).max() < 1e-4
    assert len(released["p1.0"].token_ids) == 0
    rest = run(it, [])
    assert set(rest) == {"p0.1", "p0.2"}
    for name, completion in rest.items():
        assert_same(completion, whole[name])
    moved = run(engine(), [replace(request(0), partial=released["p0.0"])])
    assert_same(moved["p0.0"], whole["p0.0"])


def lost_engine(monkeypatch: pytest.MonkeyPatch) -> TransformersEngine:
    """With four rows that have KV, and two that have none: the runner was lost in the step that admitted them."""
    it = engine(slots=6, version=version(0))
    for number in range(4):
        it.submit(request(3 * number))
    it.step()
    for number in range(4, 6):
        it.submit(request(3 * number))

    def lose(*args: Any) -> torch.Tensor:
        raise RunnerLost("gone")

    with monkeypatch.context() as patched:
        patched.setattr(it._runner, "decode", lose)
        assert it.step() == []
    assert it.lost is not None
    return it


def test_rows_that_move_without_kv_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine(slots=6), [request(3 * number) for number in range(6)])
    it = lost_engine(monkeypatch)
    it.release(["p1.0"])
    it.relocate(it._own_runner, it._slots, version(0))
    for name, completion in run(it, ()).items():
        assert_same(completion, expected[name])


def test_released_rows_without_kv_export_none(monkeypatch: pytest.MonkeyPatch) -> None:
    released = lost_engine(monkeypatch).release(["p0.0", "p4.0"], with_kv=True)
    assert [released[name].kv is not None for name in ("p0.0", "p4.0")] == [True, False]


def test_model_seconds_include_the_removal_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV moves are a part of engine steps, so the tokens a CPU second of an engine are comparable."""
    it, clock = engine(), itertools.count()
    monkeypatch.setattr("operators.rollout.transformers_engine.time.thread_time", lambda: float(next(clock)))
    remove = it._scheduler.remove_rows

    def slow(ended: Mapping[int, Completion]) -> Any:
        next(clock)  # a second of work
        return remove(ended)

    monkeypatch.setattr(it._scheduler, "remove_rows", slow)
    it.submit(request(0, new=1))
    it.step()
    assert it.status().model_seconds == 2.0
