"""Tiny random models of several families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 40
CONTEXT = 64
GQA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
NEOX = {key: value for key, value in GQA.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# How to make one, and whether its modules can be run directly.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], bool]] = {
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**GQA, tie_word_embeddings=True)), True),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**GQA, rope_parameters=LLAMA3_ROPE)), True),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**GQA, sliding_window=None)), True),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=12)), True),
    "qwen3_wide": (lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=32)), True),  # vLLM's minimum on CPUs
    "qwen3_tied": (lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=32, tie_word_embeddings=True)), True),
    "gemma": (lambda: GemmaForCausalLM(GemmaConfig(**GQA, head_dim=8)), False),  # llama's modules with other arithmetic
    "gpt_neox": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)), False),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **TOKENS)), False),
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen2_moe": lambda **other: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**GQA | EXPERTS | {"shared_expert_intermediate_size": 16} | other)
    ),
    "qwen3_moe": lambda **other: Qwen3MoeForCausalLM(Qwen3MoeConfig(**GQA | EXPERTS | {"head_dim": 12} | other)),
    "olmoe": lambda **other: OlmoeForCausalLM(OlmoeConfig(**GQA | EXPERTS | other)),
    "mixtral": lambda **other: MixtralForCausalLM(
        MixtralConfig(**GQA | {"num_local_experts": 4, "num_experts_per_tok": 2} | other)
    ),
}
"""Mixtures of experts, with changes of the configuration: trained, and generated with their own forward pass."""

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
"""105 MB of weights, at most an eighth in one layer: enough to measure in the memory of a process."""


def tiny_model(family: str = "qwen2", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "wide":
        return Qwen3ForCausalLM(Qwen3Config(**{**GQA, **WIDE}, head_dim=32)).eval()
    if family == "qwen3_moe_wide":  # vLLM's minimum on CPUs
        return MIXTURES["qwen3_moe"](head_dim=32).eval()
    return (MIXTURES[family] if family in MIXTURES else FAMILIES[family][0])().eval()
