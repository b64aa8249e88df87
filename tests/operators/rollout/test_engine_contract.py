from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_engines import (
    CONTEXT,
    GQA,
    VOCABULARY,
    assert_same,
    engine,
    mixed,
    request,
    run,
    tiny_model,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from infra.models.weights import save_weights, weight_tensors
from operators.rollout.engine import Partial, Request
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import PolicyVersion


def test_load_changes_the_weights_in_place_and_says_so(tmp_path: Path) -> None:
    save_weights(tiny_model(seed=1), tmp_path / "w")
    it = engine()
    assert it.version is None
    before = run(it, [request(0)])["p0.0"]
    it.load(tmp_path / "w", PolicyVersion(1, 7))
    assert it.version == PolicyVersion(1, 7)
    after = run(it, [request(0)])["p0.0"]
    assert after.generated.token_ids.tolist() != before.generated.token_ids.tolist()
    assert_same(after, run(TransformersEngine(tiny_model(seed=1), slots=8), [request(0)])["p0.0"])


def test_weights_laid_side_by_side_are_saved_as_ever(tmp_path: Path) -> None:
    plain, owned = tiny_model(), tiny_model()
    it = TransformersEngine(owned, slots=2)
    assert it.direct
    save_weights(plain, tmp_path / "plain")
    save_weights(owned, tmp_path / "owned")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "owned").read_bytes()


def test_load_while_busy_raises_and_changes_nothing(tmp_path: Path) -> None:
    save_weights(tiny_model(seed=1), tmp_path / "w")
    it = engine(slots=1)
    it.submit(request(0))
    with pytest.raises(RuntimeError, match="0 requests run and 1 wait"):
        it.load(tmp_path / "w", PolicyVersion(1, 7))
    it.step()
    with pytest.raises(RuntimeError, match="1 requests run and 0 wait"):
        it.load(tmp_path / "w", PolicyVersion(1, 7))
    assert it.version is None
    assert_same(run(it, [])["p0.0"], run(engine(), [request(0)])["p0.0"])


def test_weights_of_another_shape_raise_and_change_nothing(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in weight_tensors(tiny_model(seed=1)).items()}
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, tmp_path / "w")
    it = engine()
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[5\], the model \[32\]"):
        it.load(tmp_path / "w", PolicyVersion(1, 7))
    assert it.version is None
    assert_same(run(it, [request(0)])["p0.0"], run(engine(), [request(0)])["p0.0"])


# --- what is refused


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(0, prompt=0), "the prompt is empty"),
        (request(0, prompt=CONTEXT), "leaves no room in a context of 64"),
        (replace(request(0), prompt=np.array([1, VOCABULARY])), "token 40 of the prompt is not in the vocabulary"),
        (replace(request(0), prompt=np.array([1, -1])), "token -1 of the prompt"),
        (replace(request(0), prompt=np.array([[1]])), "must be a row of integers"),
        (replace(request(0), prompt=np.array([1.0])), "must be a row of integers"),
        (replace(request(0), partial=Partial(np.array([99]), np.zeros(1))), "token 99 of the partial"),
        (replace(request(0), partial=Partial(np.array([1]), np.zeros(2))), "1 tokens but 2 logprobs"),
        (replace(request(0), partial=Partial(np.ones(60, int), np.zeros(60))), "longer than the context"),
        (request(0, temperature=-1.0), "temperature must be"),
        (request(0, temperature=float("nan")), "temperature must be"),
        (request(0, top_p=0.0), "top_p must be"),
        (request(0, top_k=-1), "top_k must be"),
        (request(0, new=0), "max_new_tokens must be"),
        (request(0, stops=(VOCABULARY,)), "stop token 40"),
    ],
)
def test_garbage_is_refused_by_name(bad: Request, message: str) -> None:
    it = engine()
    with pytest.raises(ValueError, match=rf"'p0\.0'.*{message}"):
        it.submit(bad)
    assert it.status().waiting == 0


def test_close_frees_the_kv_and_can_be_repeated() -> None:
    it = engine()
    kv = weakref.ref(it._kv)
    it.close()
    assert kv() is None
    it.close()


def test_a_known_id_is_refused() -> None:
    it = engine()
    it.submit(request(0))
    with pytest.raises(ValueError, match=r"'p0\.0' is here already"):
        it.submit(request(0))


def test_models_that_do_not_fit_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="64 positions"):
        engine(context=65)
    windowed = MistralForCausalLM(MistralConfig(**GQA, sliding_window=16))
    with pytest.raises(ValueError, match="attends over 16 tokens"):
        TransformersEngine(windowed, slots=2)
    assert TransformersEngine(windowed, slots=2, context=16).direct
    alternating = Gemma2ForCausalLM(Gemma2Config(**GQA, head_dim=8, sliding_window=16))
    with pytest.raises(ValueError, match="attends over 16 tokens"):
        TransformersEngine(alternating, slots=2)


def test_a_model_without_the_llama_layout_says_once_that_it_is_slower(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="operators.rollout"):
        run(engine("gpt2"), mixed(4))
        assert ["its own forward, which is slower" in record.message for record in caplog.records] == [True]
        caplog.clear()
        run(engine("qwen2"), mixed(4))
        assert caplog.records == []
