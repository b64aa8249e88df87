"""vLLM engines over a tiny model. Opening one takes seconds, so engines with equal options are reused."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import CONTEXT, tiny_model

from operators.rollout.engine import Engine

FAMILY = "qwen3_wide"


def vllm_engine(family: str = FAMILY, slots: int = 8, kv_capacity: int | None = None, dtype: str = "float32") -> Engine:
    """An engine without requests and without a version, over the weights of `tiny_model(family)`."""
    from operators.rollout.vllm_engine import VllmEngine
    from operators.rollout.vllm_worker import load_worker_weights

    class Kept(VllmEngine):
        def close(self) -> None:
            self.__dict__.clear()

    opened = _opened(family, slots, kv_capacity, dtype)
    core = opened.engine_core
    core.abort_requests(list(core.engine_core.scheduler.requests))
    opened.collective_rpc(load_worker_weights, args=(str(model_folder(family) / "model.safetensors"),))
    opened.reset_prefix_cache()
    return Kept(opened)


@cache
def model_folder(family: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="laminar-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny_model(family).save_pretrained(folder)
    return folder


@cache
def _opened(family: str, slots: int, kv_capacity: int | None, dtype: str) -> Any:
    from operators.rollout.vllm_engine import open_vllm

    return open_vllm(model_folder(family), slots=slots, context=CONTEXT, kv_capacity=kv_capacity, dtype=dtype)
