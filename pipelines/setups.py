"""The rollouts of the target set-ups of docs/training.md, whose configurations are in examples/setups."""

from __future__ import annotations

from infra.models.sizes import kv_values
from operators.rollout.replica_memory import ReplicaMemory
from operators.trainer.memory_plan import Target, shape_of_config

_CONTEXT = 8192
_GPUS_AND_SLOTS = {
    "Qwen2.5-7B": (1, 96),
    "Qwen2.5-32B": (2, 28),
    "Qwen2.5-72B": (4, 40),
    "Qwen3-30B-A3B": (2, 80),
}
"""The GPUs of a replica, and its slots, by model."""


def rollout_row(target: Target) -> dict[str, str | int | float]:
    """The rollouts of `target`: the GPUs, slots and context of a replica, and what each GPU holds in bfloat16, of
    weights, of the KV of all slots, and in total, in 10^9 bytes.
    """
    gpus, slots = _GPUS_AND_SLOTS[target.model]
    memory = ReplicaMemory(shape_of_config(target.config).parameters, kv_values(target.config), "bfloat16")
    weights, kv = (size / gpus / 10**9 for size in (memory.weights, memory.kv(slots * _CONTEXT)))
    own = {"gpus": gpus, "slots": slots, "context": _CONTEXT}
    return {"model": target.model, **own, "weights": weights, "kv": kv, "total": weights + kv}
