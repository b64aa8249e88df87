"""The module layout shared by Llama, Qwen2, Mistral and many others, with fused projections.

Weights multiplied with the same input become views of one tensor, so that one product computes all of them. They stay
the model's own parameters: `state_dict`, loading in place and training code work as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """Views of one layer's parameters, in the layout of the kernels ([in, out] for those added to the residual)."""

    input_norm: nn.Parameter
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[nn.Parameter, nn.Parameter] | None
    """Norms of queries and keys, [head_size] each, for models with a norm per head (Qwen3)."""
    output: torch.Tensor
    mlp_norm: nn.Parameter
    gate_up: torch.Tensor
    down: torch.Tensor


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why `model` does not have this layout; None if it does. The runner check still has to compare its logits."""
    body: Any = getattr(model, "model", None)
    if body is None or not {"embed_tokens", "layers", "norm", "rotary_emb"} <= set(dict(body.named_children())):
        return "it lacks some of the modules embed_tokens, layers, norm and rotary_emb"
    if not isinstance(getattr(model, "lm_head", None), nn.Linear) or model.lm_head.bias is not None:
        return "lm_head is not a linear layer without bias"
    rotary = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in _STATIC_ROTARY:
        return f"its rotary embedding is {rotary!r}"
    if not hasattr(body.norm, "variance_epsilon"):
        return "its norm is not an RMS norm"
    for i, layer in enumerate(body.layers):
        parts = {name: set(dict(module.named_children())) for name, module in layer.named_children()}
        if parts.keys() != _LAYER or not parts["mlp"] <= _MLP:
            return f"the modules of layer {i} differ from those of a llama layer"
        if parts["self_attn"] not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
            return f"the attention modules of layer {i} differ from llama's and Qwen3's"
        attention = [getattr(layer.self_attn, name) for name in sorted(_PROJECTIONS)]
        mlp = [getattr(layer.mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if any(type(module) is not nn.Linear for module in attention + mlp):
            return f"layer {i} has projections that are not plain linear ones"
        if any(module.bias is not None for module in (layer.self_attn.o_proj, *mlp)):
            return f"layer {i} has biases outside q, k and v"
        if len({getattr(layer.self_attn, name).bias is None for name in ("q_proj", "k_proj", "v_proj")}) != 1:
            return f"layer {i} has biases on some of q, k and v"
        if 2 * body.rotary_emb.inv_freq.numel() != layer.self_attn.head_dim:
            return "its rotary embedding covers only part of a head"
    return None


def fuse_projections(layer: Any) -> LlamaLayer:
    """Make the q, k, v and the gate, up parameters of `layer` views of one tensor each, values unchanged."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LlamaLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_fuse([module.weight for module in projections]),
        qkv_bias=None if attention.q_proj.bias is None else _fuse([module.bias for module in projections]),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None,
        output=attention.o_proj.weight.detach().t(),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_fuse([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight.detach().t(),
    )


def _fuse(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    joined = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(joined, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined
