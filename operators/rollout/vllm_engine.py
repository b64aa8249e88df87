"""The vLLM engine: vLLM's continuous batching, paged KV and prefix cache, with our weights, and our draws or vLLM's.

vLLM's engine core runs in this process; with tensor parallelism its workers run in others. It schedules a step while
the one before it runs. This module keeps the generated tokens of every request, so that a released partial response is
complete; it is resumed by one prefill of prompt and partial response.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vllm reads these at import
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a rollout process has threads
# Its collectives have no authentication. They listen at the address of the host name, unless they are given another.
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from infra.memory import usable_memory
from infra.models.weights import check_weights
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Completion, EngineStatus, PartialResponse, Request
from operators.rollout.kv_rows import generation_limit
from operators.rollout.request_checks import check_loadable, check_request
from operators.rollout.scheduler import finished_reason
from operators.rollout.vllm_options import reject_on_cpu, reject_unknown
from operators.rollout.vllm_sampling import NOT_FINITE, check_temperature, draw_processors, sampling_params
from operators.rollout.vllm_worker import clear_kv, load_worker_weights
from schemas.records import PolicyVersion, TokenSampler


@dataclass(slots=True)
class _TrackedRequest:
    """A request and its tokens: those of its partial response, then those that vLLM generated. `core_id` is vLLM's."""

    request: Request
    core_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    started: bool = False

    def partial(self, start: int = 0) -> PartialResponse:
        return PartialResponse(np.array(self.token_ids[start:], np.int32), np.array(self.logprobs[start:], np.float32))


def engine_arguments(
    model: Path,
    *,
    slots: int,
    context: int,
    kv_capacity: int | None = None,
    dtype: str = "float32",
    block_size: int = 32,
    gpus: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """The engine arguments of vLLM for the arguments of `open_vllm`, with the same errors."""
    reject_unknown(options, [each.name for each in fields(EngineArgs)])
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": context,
        "max_num_seqs": slots,
        "block_size": block_size,
        "enable_prefix_caching": True,
        "tensor_parallel_size": gpus,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    on_cpu = current_platform.is_cpu()
    if on_cpu or kv_capacity is not None:
        wanted = slots * context if kv_capacity is None else kv_capacity
        blocks = max(wanted // block_size, -(-context // block_size)) + 1  # vLLM reserves one block
        arguments["num_gpu_blocks_override"] = blocks
        if on_cpu:  # by default vLLM takes nearly all memory
            arguments["kv_cache_memory_bytes"] = (blocks + 1) * block_size * _token_bytes(model, dtype)
    if on_cpu:
        reject_on_cpu(options)
        options["enforce_eager"] = True
    return arguments | options


def open_vllm(model: Path, *, token_sampler: TokenSampler = "laminar", **options: Any) -> LLMEngine:
    """vLLM over the Hugging Face model in folder `model`, for a `VllmEngine` with the draws of `token_sampler`.

    At most `slots` requests run at once, of at most `context` tokens each; `kv_capacity` bounds their tokens together,
    in blocks of `block_size` tokens (default: on a CPU slots × context, on GPUs what fits their memory). `gpus` is the
    tensor-parallel size. All other `options` are passed to vLLM's EngineArgs and override ours. Raises CannotGenerate
    for options that vLLM does not have, or a CPU cannot, and what vLLM raises for a model that it cannot run.

    A process opens engines of one `token_sampler`: on a GPU they have different runners of vLLM.
    """
    if token_sampler == "laminar":
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the newer one has no processors such as ours
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        async_scheduling=True,
        **draw_processors(token_sampler),
        **engine_arguments(model, **options),
    )
    with _restore_ld_preload():
        return LLMEngine.from_engine_args(arguments)


def device_memory() -> int:
    """Bytes of one of a replica's GPUs, or of the machine. It does not initialize CUDA in this process."""
    if current_platform.is_cpu():
        return usable_memory().total
    return int(current_platform.get_device_total_memory())


def memory_share(config: RolloutConfig) -> float:
    """The share of `device_memory` for weights and KV: all of it where the size of the KV is set by itself."""
    sized = {"kv_cache_memory_bytes", "num_gpu_blocks_override"} & config.vllm.keys()
    if current_platform.is_cpu() or sized or config.kv_capacity is not None:
        return 1.0
    return float(config.vllm.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization))


def _token_bytes(model: Path, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * size * getattr(torch, dtype).itemsize


def finish_steps(vllm: LLMEngine) -> None:
    """Finish the steps that vLLM has begun, whose tokens belong to requests that it no longer has."""
    core = vllm.engine_core
    while core.engine_core.batch_queue:
        core.get_output()


@contextmanager
def _restore_ld_preload() -> Iterator[None]:
    """Restore LD_PRELOAD, which vLLM sets for its workers, so that later child processes do not inherit it."""
    before = os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if before is not None:
            os.environ["LD_PRELOAD"] = before


class VllmEngine:
    """An `Engine` over `vllm`, the result of `open_vllm`, which it owns."""

    def __init__(self, vllm: LLMEngine) -> None:
        model, cache = vllm.model_config, vllm.vllm_config.cache_config
        with torch.device("meta"):
            self._shape = AutoModelForCausalLM.from_config(model.hf_config, dtype=model.dtype)
        self._vocabulary, self._context = model.get_vocab_size(), model.max_model_len
        self._slots = vllm.vllm_config.scheduler_config.max_num_seqs
        self._kv_capacity = (cache.num_gpu_blocks - 1) * cache.block_size
        self._vllm, self._core = vllm, vllm.engine_core
        self._scheduler = self._core.engine_core.scheduler
        self._token_sampler: TokenSampler = "laminar" if model.logits_processors else "vllm"
        self._requests: dict[str, _TrackedRequest] = {}
        self._by_core_id: dict[str, _TrackedRequest] = {}
        self._numbers = itertools.count()
        self._done: list[Completion] = []
        self._started: list[str] = []
        self._tokens_generated = 0
        self._model_seconds = 0.0
        """CPU time of vLLM's steps, its scheduling included."""
        self.version: PolicyVersion | None = None
        """The weight version loaded, None before the first."""
        self._status = self._read_status()

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Replace the weights in place with the safetensors file `weights`, which each worker reads, and reset the
        prefix cache. Raises as every engine does."""
        check_loadable(self.status(), version)
        check_weights(self._shape, weights, rounds=True)
        finish_steps(self._vllm)
        self._vllm.collective_rpc(load_worker_weights, args=(str(weights.absolute()),))
        self._reset_prefix_cache()
        self.version = version

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError as every engine does."""
        check_request(request, self._vocabulary, self._context)
        check_temperature(request, self._token_sampler)
        name = request.trajectory_id
        if name in self._requests or any(name == done.trajectory_id for done in self._done):
            raise ValueError(f"trajectory {name!r} is already in the engine")
        reason = finished_reason(request, self._context)
        if reason is not None and request.partial is not None:
            self._done.append(Completion(name, request.partial, reason))
            self._status = self._read_status()
            return
        tracked = _TrackedRequest(request)
        if request.partial is not None:
            tracked.token_ids += request.partial.token_ids.tolist()
            tracked.logprobs += request.partial.logprobs.tolist()
        self._add(tracked)
        self._requests[name] = tracked
        self._status = self._read_status()

    def step(self) -> Sequence[Completion]:
        """Run one round of vLLM and return the requests that finished in it; an empty engine returns at once."""
        done, self._done = self._done, []
        if self._requests:
            before = time.thread_time()
            outputs = self._core.get_output()
            self._model_seconds += time.thread_time() - before
            if failed := [each.request_id for each in outputs.outputs if self._record_output(each, done)]:
                self._restart_requests(failed)
        self._status = self._read_status()
        return done

    def take_started(self) -> Sequence[str]:
        """Requests whose first token was generated here since the last call, finished ones included."""
        started, self._started = self._started, []
        return started

    def due(self) -> float:
        """0 while there are requests, infinite otherwise."""
        return 0.0 if self._requests or self._done else math.inf

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return their partial responses, without KV; unknown ids are left out."""
        wanted = set(trajectory_ids)
        released = {done.trajectory_id: done.generated for done in self._done if done.trajectory_id in wanted}
        self._done = [done for done in self._done if done.trajectory_id not in wanted]
        here = [each for name, each in self._requests.items() if name in wanted]
        self._core.abort_requests([each.core_id for each in here])
        released |= {self._forget(each): each.partial() for each in here}
        self._status = self._read_status()
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on; unknown ids are left out."""
        return {name: self._requests[name].partial(start) for name, start in since.items() if name in self._requests}

    def status(self) -> EngineStatus:
        """The load after the last call; any thread may call it."""
        return self._status

    def close(self) -> None:
        """Free the engine's resources; afterwards it can only be closed again."""
        if (core := self.__dict__.get("_core")) is not None:
            core.shutdown()
        self.__dict__.clear()

    def _add(self, tracked: _TrackedRequest) -> None:
        request, known = tracked.request, len(tracked.token_ids)
        # A step that runs may still return a token of an aborted request of the same trajectory.
        tracked.core_id = f"{request.trajectory_id}#{next(self._numbers)}"
        self._by_core_id[tracked.core_id] = tracked
        left = generation_limit(request, self._context) - known
        # The public method would validate the request again and copy its parameters.
        self._core.add_request(
            EngineCoreRequest(
                request_id=tracked.core_id,
                prompt_token_ids=[*request.prompt.tolist(), *tracked.token_ids],
                mm_features=None,
                sampling_params=sampling_params(request, known, left, self._token_sampler),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def _forget(self, tracked: _TrackedRequest) -> str:
        """Remove a request; returns its trajectory's id."""
        name = tracked.request.trajectory_id
        del self._requests[name], self._by_core_id[tracked.core_id]
        return name

    def _restart_requests(self, failed: list[str]) -> None:
        """Abort the `failed` requests, clear the KV and restart all others from their tokens: non-finite values would
        corrupt requests that get the same blocks or share the prompt."""
        self._core.abort_requests([*failed, *self._by_core_id])
        self._by_core_id.clear()
        finish_steps(self._vllm)
        self._vllm.collective_rpc(clear_kv)
        self._reset_prefix_cache()
        for tracked in self._requests.values():
            self._add(tracked)

    def _reset_prefix_cache(self) -> None:
        if not self._vllm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, which is invalid")

    def _record_output(self, output: EngineCoreOutput, done: list[Completion]) -> bool:
        """Record the new tokens of a request; returns whether it failed, usually by logits that are not finite."""
        tracked = self._by_core_id.get(output.request_id)
        if tracked is None:
            return False
        name, new = tracked.request.trajectory_id, output.new_token_ids
        logprobs = [] if output.new_logprobs is None else [float(each[0]) for each in output.new_logprobs.logprobs]
        if new and not tracked.started:
            tracked.started = True
            self._started.append(name)
        not_finite = any(each == NOT_FINITE or math.isnan(each) for each in logprobs)
        if not_finite or len(logprobs) != len(new) or output.finish_reason == FinishReason.ERROR:
            error = "logits that are not finite" if not_finite else "vLLM failed the request"
            done.append(Completion(name, tracked.partial(), "failed", error))
            self._forget(tracked)
            return True
        tracked.token_ids += new
        tracked.logprobs += logprobs
        self._tokens_generated += len(new)
        if output.finish_reason is not None:
            reason = "stop" if output.finish_reason == FinishReason.STOP else "length"
            done.append(Completion(name, tracked.partial(), reason))
            self._forget(tracked)
        return False

    def _read_status(self) -> EngineStatus:
        running = len(self._scheduler.running)
        return EngineStatus(
            running=running,
            waiting=len(self._requests) + len(self._done) - running,
            capacity=self._slots,
            kv_used=round(self._scheduler.kv_cache_manager.usage * self._kv_capacity),
            kv_capacity=self._kv_capacity,
            tokens_generated=self._tokens_generated,
            model_seconds=self._model_seconds,
        )
