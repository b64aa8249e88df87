"""vLLM engines over a tiny model. Opening one takes seconds, so engines with equal options are reused."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import CONTEXT, tiny_model

from operators.rollout.engine import Engine

if TYPE_CHECKING:
    from schemas.records import TokenSampler

FAMILY = "qwen3_wide"
MIXTURE = "qwen3_moe_wide"

_engines: list[Any] = []


def vllm_engine(
    family: str = FAMILY,
    slots: int = 8,
    kv_capacity: int | None = None,
    dtype: str = "float32",
    token_sampler: TokenSampler = "laminar",
    asynchronous: bool = False,
) -> Engine:
    """An engine without requests and without a version, over the weights of `tiny_model(family)`.

    `asynchronous`: it schedules a step while the one before it runs, as on GPUs.
    """
    from operators.rollout.vllm_engine import VllmEngine, finish_steps
    from operators.rollout.vllm_worker import load_worker_weights

    class Kept(VllmEngine):
        def close(self) -> None:
            self.__dict__.clear()

    opened = _opened(family, slots, kv_capacity, dtype, token_sampler, asynchronous)
    core = opened.engine_core
    core.abort_requests(list(core.engine_core.scheduler.requests))
    finish_steps(opened)
    opened.collective_rpc(load_worker_weights, args=(str(model_folder(family) / "model.safetensors"),))
    opened.reset_prefix_cache()
    return Kept(opened)


@cache
def model_folder(family: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="laminar-tiny-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny_model(family).save_pretrained(folder)
    return folder


@cache
def _opened(
    family: str, slots: int, kv_capacity: int | None, dtype: str, token_sampler: TokenSampler, asynchronous: bool
) -> Any:
    from vllm.distributed import parallel_state

    from operators.rollout.vllm_engine import open_vllm

    if family == MIXTURE and _engines and parallel_state._EP is None:
        while _engines:  # the first engine of a process decides whether it has a group for experts
            _engines.pop().engine_core.shutdown()
        _opened.cache_clear()
    options: dict[str, Any] = {"slots": slots, "context": CONTEXT, "kv_capacity": kv_capacity, "dtype": dtype}
    with _scheduling(asynchronous):
        opened = open_vllm(model_folder(family), token_sampler=token_sampler, **options)
    _engines.append(opened)
    return opened


def _scheduling(asynchronous: bool) -> AbstractContextManager[None]:
    if not asynchronous:
        return nullcontext()
    from asynchronous_vllm import asynchronous_scheduling

    return asynchronous_scheduling()
