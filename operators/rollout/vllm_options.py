"""Which engine arguments of vLLM `rollout.vllm` and a CPU cannot have. It does not import vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SETTINGS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "slots": "rollout.slots",
    "max_num_seqs": "rollout.slots",
    "context": "rollout.context",
    "max_model_len": "rollout.context",
    "kv_capacity": "rollout.kv_capacity",
    "token_sampler": "rollout.token_sampler",
    "gpus": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
}
"""Arguments that have a setting, by which other roles and the GPU map know them."""
_FIXED = ("async_scheduling", "logits_processors", "logprobs_mode", "skip_tokenizer_init")
"""Arguments whose value the draws need."""


def reject_own(options: Mapping[str, Any]) -> None:
    """Raise ValueError for `options` of vLLM that Laminar sets itself, or that would have no effect."""
    for name in options:
        if name in _SETTINGS:
            raise ValueError(f"vllm.{name} cannot be set: set {_SETTINGS[name]}")
        if name in _FIXED:
            raise ValueError(
                f"vllm.{name} cannot be set: the draws need Laminar's value. Remove it, or set rollout.token_sampler"
            )
    if options.get("enable_sleep_mode"):
        raise ValueError("vllm.enable_sleep_mode would have no effect: nothing puts a rollout to sleep. Remove it")


def reject_on_cpu(options: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the setting, for `options` of vLLM that need a GPU: compiled code, FP8."""
    if not options.get("enforce_eager", True):
        raise ValueError("enforce_eager must be true on a CPU: compiled code keeps its first weights")
    for name in ("quantization", "kv_cache_dtype"):
        value = str(options.get(name) or "")
        if "fp8" in value.lower():
            raise ValueError(
                f"rollout.vllm.{name} = {value!r} needs a GPU: vLLM has no FP8 kernels for CPUs. Remove it, or set "
                "rollout.dtype = 'bfloat16' for half the memory of float32"
            )
