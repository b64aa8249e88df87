"""Packed logprobs match a plain forward for every tested model family; unsupported models are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, GQA, TOKENS, VOCABULARY, tiny_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from operators.trainer.config import LearnerConfig
from operators.trainer.packing import pack_tokens
from operators.trainer.policy import check_trainable, load_policy, packed_contexts, token_logprobs

CPU = torch.device("cpu")
FULL = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradient_match_plain_forward(tmp_path: Path, family: str) -> None:
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, CPU).model
    source = np.random.default_rng(1)
    lengths, temperatures = np.array([9, 40, 2, 23, 22]), np.array([1.5, 1.0, 1.0, 0.7, 1.0], np.float32)
    rows = [torch.from_numpy(source.integers(0, VOCABULARY, length)) for length in lengths]
    later = np.concatenate([np.arange(length) > 0 for length in lengths])
    packed = pack_tokens(torch.cat(rows).numpy(), later, lengths, CPU, temperatures)
    found, _ = token_logprobs(policy, packed, 1000)
    logits = [plain(input_ids=row[None]).logits[0, :-1] / float(t) for row, t in zip(rows, temperatures, strict=True)]
    expected = torch.cat(
        [own.log_softmax(-1).gather(1, row[1:, None])[:, 0] for own, row in zip(logits, rows, strict=True)]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    weights = torch.linspace(-1, 2, len(found))
    for logprobs in (found, expected):
        torch.autograd.backward((weights * logprobs).sum())
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.named_parameters():
        wanted = gradients[name]
        assert (parameter.grad is None) is (wanted is None), name
        if wanted is not None:
            assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: Qwen2ForCausalLM(
                Qwen2Config(**GQA, use_sliding_window=True, sliding_window=16, max_window_layers=1)
            ),
            "has sliding_attention layers: only full attention can be trained",
        ),
        (
            lambda: MistralForCausalLM(MistralConfig(**GQA, sliding_window=16)),
            r"MistralAttention, of model type mistral, passes sliding_window \(16\) to attention",
        ),
        (
            lambda: Gemma2ForCausalLM(Gemma2Config(**GQA, **FULL, head_dim=8)),
            r"Gemma2Attention, of model type gemma2, passes softcap \(50.0\) to attention",
        ),
        (
            lambda: GptOssForCausalLM(
                GptOssConfig(**GQA, **FULL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
            ),
            r"GptOssAttention, of model type gpt_oss, passes s_aux \(\(4,\) numbers\) to attention",
        ),
        (
            lambda: GraniteForCausalLM(GraniteConfig(**GQA, logits_scaling=8.0)),
            "its packed logprobs differ from those of its own forward by .* of the largest",
        ),
    ],
)
def test_load_policy_rejects_unsupported_attention(
    tmp_path: Path, make: Callable[[], PreTrainedModel], reason: str
) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason) as refusal:
        load_policy(tmp_path, CPU)
    assert str(tmp_path) in str(refusal.value)


def test_model_of_more_than_text_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """transformers has a causal language model for it, whose sizes are in a part of its config."""
    Gemma3Config(text_config={**GQA, "head_dim": 8}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"has a text_config: only models of text alone can be trained"):
        check_trainable(tmp_path, LearnerConfig(), 1)


def test_recomputed_layers_apply_no_dropout(tmp_path: Path) -> None:
    """OPT's layers apply it themselves, by their own training mode."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    OPTForCausalLM(OPTConfig(**TOKENS, **sizes, vocab_size=VOCABULARY, num_attention_heads=4)).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, CPU, gradient_checkpointing=True)
    first, second = (policy(packed_contexts(policy.model, CPU))[0] for _ in range(2))
    assert torch.equal(first, second)
