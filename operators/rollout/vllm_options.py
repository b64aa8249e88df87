"""Which engine arguments of vLLM `rollout.vllm` and a CPU cannot have. It does not import vLLM."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from infra.name_lookup import suggest_name
from operators.rollout.engine import CannotGenerate

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
        raise ValueError(
            "vllm.enable_sleep_mode would have no effect: nothing puts a rollout to sleep. Remove it; "
            "autoscaling.devices divides the time of GPUs between rollouts and the trainer"
        )


def reject_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise CannotGenerate for `options` that are not among the `known` engine arguments; none known: not checked."""
    for name in options:
        if known and name not in known:
            hint = suggest_name(name, known, 0) or "; remove it"
            raise CannotGenerate(f"rollout.vllm.{name} is no engine argument of the vLLM that is installed{hint}")


def argument_names() -> frozenset[str]:
    """The engine arguments of the vLLM that is installed, from its source: its import takes seconds. Empty if they are
    not found there."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            return frozenset(each.id for each in fields if isinstance(each, ast.Name))
    return frozenset()


def reject_on_cpu(options: Mapping[str, Any]) -> None:
    """Raise CannotGenerate, naming the setting, for `options` of vLLM that need a GPU: compiled code, FP8."""
    if not options.get("enforce_eager", True):
        raise CannotGenerate(
            "rollout.vllm.enforce_eager must be true on a CPU: compiled code keeps its first weights. Remove it"
        )
    for name in ("quantization", "kv_cache_dtype"):
        value = str(options.get(name) or "")
        if "fp8" in value.lower():
            raise CannotGenerate(
                f"rollout.vllm.{name} = {value!r} needs a GPU: vLLM has no FP8 kernels for CPUs. Remove it, or set "
                "rollout.dtype = 'bfloat16' for half the memory of float32"
            )
