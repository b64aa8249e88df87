"""Which engine arguments of vLLM a CPU cannot have. It does not import vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reject_on_cpu(options: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the setting, for `options` of vLLM that need a GPU: compiled code, sleep, FP8."""
    if not options.get("enforce_eager", True):
        raise ValueError("enforce_eager must be true on a CPU: compiled code keeps its first weights")
    if options.get("enable_sleep_mode"):
        raise ValueError(
            "rollout.vllm.enable_sleep_mode needs a GPU: a sleeping engine frees GPU memory for the trainer. Remove it"
        )
    for name in ("quantization", "kv_cache_dtype"):
        value = str(options.get(name) or "")
        if "fp8" in value.lower():
            raise ValueError(
                f"rollout.vllm.{name} = {value!r} needs a GPU: vLLM has no FP8 kernels for CPUs. Remove it, or set "
                "rollout.dtype = 'bfloat16' for half the memory of float32"
            )
