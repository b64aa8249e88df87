"""Maps tensors in memory to their names in a checkpoint, where transformers uses other names, so that any engine can
load them.

A checkpoint of a mixture of experts has one tensor per expert and projection; transformers stores those of a layer in
two tensors, [experts, ...] each, and splits them when it saves a model. The parts are views of the model's memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Naming:
    """A model family's names of the block and of the gate, up and down projections."""

    block: str
    gate: str
    up: str
    down: str


_QWEN = _Naming("mlp", "gate_proj", "up_proj", "down_proj")
_FAMILIES = {
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "olmoe": _QWEN,
    "mixtral": _Naming("block_sparse_moe", "w1", "w3", "w2"),
}
_RENAMED = {"gpt_neox": ("lm_head.", "embed_out.")}
_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")


def checkpoint_tensors(model_type: str, names: Sequence[str], tensor: Tensor) -> list[tuple[list[str], Tensor]]:
    """Split `tensor`, called `names` in the model, into the named tensors of a checkpoint of `model_type`."""
    naming = _FAMILIES.get(model_type)
    if naming is None:
        inside, saved = _RENAMED.get(model_type, ("", ""))
        return [([name.replace(inside, saved) if inside else name for name in names], tensor)]
    fused = _FUSED.fullmatch(names[0])
    if fused is None:
        return [([name.replace(".mlp.", f".{naming.block}.") for name in names], tensor)]
    before, kind = f"{fused[1]}{naming.block}.experts", fused[2]
    if kind == "down_proj":
        return [([f"{before}.{expert}.{naming.down}.weight"], each) for expert, each in enumerate(tensor)]
    parts = []
    for expert, each in enumerate(tensor):
        gate, up = each.chunk(2)
        parts += [([f"{before}.{expert}.{naming.gate}.weight"], gate), ([f"{before}.{expert}.{naming.up}.weight"], up)]
    return parts
