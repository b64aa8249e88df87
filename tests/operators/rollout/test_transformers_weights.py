"""Weights, models and memory of the transformers engine; the contract of all engines is in test_engine_weights.py."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import pytest
from tiny_engines import engine, mixed, run
from tiny_models import GQA, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from infra.models.weights import save_weights
from operators.rollout.transformers_engine import TransformersEngine


def test_fused_weights_are_saved_unchanged(tmp_path: Path) -> None:
    plain, owned = tiny_model(), tiny_model()
    it = TransformersEngine(owned, slots=2)
    assert it.direct
    save_weights(plain, tmp_path / "plain")
    save_weights(owned, tmp_path / "owned")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "owned").read_bytes()


def test_close_frees_the_kv_and_can_be_repeated() -> None:
    it = engine()
    kv = weakref.ref(it._kv)
    it.close()
    assert kv() is None
    it.close()


def test_unsupported_models_are_rejected() -> None:
    with pytest.raises(ValueError, match="64 positions"):
        engine(context=65)
    windowed = MistralForCausalLM(MistralConfig(**GQA, sliding_window=16))
    with pytest.raises(ValueError, match="attends over 16 tokens"):
        TransformersEngine(windowed, slots=2)
    assert TransformersEngine(windowed, slots=2, context=16).direct
    alternating = Gemma2ForCausalLM(Gemma2Config(**GQA, head_dim=8, sliding_window=16))
    with pytest.raises(ValueError, match="attends over 16 tokens"):
        TransformersEngine(alternating, slots=2)


def test_other_layouts_log_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="operators.rollout"):
        run(engine("gpt2"), mixed(4))
        assert ["its own forward, which is slower" in record.message for record in caplog.records] == [True]
        caplog.clear()
        run(engine("qwen2"), mixed(4))
        assert caplog.records == []
