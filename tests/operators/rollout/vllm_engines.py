"""vLLM engines over a tiny model. Opening one takes seconds, so those of a kind are used again."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import CONTEXT, tiny_model

from operators.rollout.engine import Engine

FAMILY = "qwen3_wide"


def vllm_engine(slots: int = 8, kv_capacity: int | None = None) -> Engine:
    """One without requests and without a version, over the weights of `tiny_model(FAMILY)`."""
    from operators.rollout.vllm_engine import VllmEngine

    class Kept(VllmEngine):
        def close(self) -> None:
            self.__dict__.clear()

    opened = _opened(slots, kv_capacity)
    core = opened.engine_core
    core.abort_requests(list(core.engine_core.scheduler.requests))
    opened.collective_rpc("reload_weights", kwargs={"weights_path": str(_folder())})
    opened.reset_prefix_cache()
    return Kept(opened)


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="laminar-tiny-"))
    tiny_model(FAMILY).save_pretrained(folder)
    return folder


@cache
def _opened(slots: int, kv_capacity: int | None) -> Any:
    from operators.rollout.vllm_engine import open_vllm

    return open_vllm(
        _folder(), slots=slots, context=CONTEXT, kv_capacity=kv_capacity, enforce_eager=True, gpu_memory_utilization=0.1
    )
