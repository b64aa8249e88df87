"""The engine that vLLM runs: its continuous batching, paged KV and prefix cache, with our draws and our weights.

vLLM's engine core runs in this process; with tensor parallelism its workers do not. What is generated is kept here as
it comes, so that what is released is known to the last token; where it goes on, prompt and partial are one prefill.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # these are read as vllm is imported
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a rollout has threads

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from infra.models.weights import check_weights
from operators.rollout.engine import Completion, EngineStatus, PartialResponse, Request
from operators.rollout.kv_rows import generation_limit
from operators.rollout.random_streams import stream_key
from operators.rollout.request_checks import check_loadable, check_request
from operators.rollout.scheduler import finished_reason
from operators.rollout.vllm_sampling import NOT_FINITE, DrawTokens, draw_argument
from operators.rollout.vllm_worker import clear_kv, load_worker_weights
from schemas.records import PolicyVersion


@dataclass(slots=True)
class _TrackedRequest:
    """A request and what it has: the tokens of its partial, then those that vLLM made."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    began: bool = False

    def partial(self, start: int = 0) -> PartialResponse:
        return PartialResponse(np.array(self.token_ids[start:], np.int32), np.array(self.logprobs[start:], np.float32))


def engine_arguments(
    model: Path,
    *,
    slots: int,
    context: int,
    kv_capacity: int | None = None,
    dtype: str = "float32",
    block: int = 32,
    gpus: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of vLLM's engine for what `open_vllm` is asked for. Raises ValueError for compiled code on a CPU."""
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": context,
        "max_num_seqs": slots,
        "block_size": block,
        "enable_prefix_caching": True,
        "tensor_parallel_size": gpus,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    on_cpu = current_platform.is_cpu()
    if on_cpu or kv_capacity is not None:
        wanted = slots * context if kv_capacity is None else kv_capacity
        blocks = max(wanted // block, -(-context // block)) + 1  # vLLM keeps one for itself
        arguments["num_gpu_blocks_override"] = blocks
        if on_cpu:  # or it takes nearly all memory that there is
            arguments["kv_cache_memory_bytes"] = (blocks + 1) * block * _token_bytes(model, dtype)
    if on_cpu and not options.setdefault("enforce_eager", True):
        raise ValueError("enforce_eager must be true on a CPU: compiled code keeps the weights that it was made with")
    return arguments | options


def open_vllm(model: Path, **asked: Any) -> LLMEngine:
    """vLLM over the Hugging Face model in folder `model`, set up for `VllmEngine`.

    `slots` requests run at once, of at most `context` tokens each; `kv_capacity` bounds their tokens together, in
    blocks of `block` tokens (default: on a CPU slots × context, on GPUs what vLLM finds room for). `gpus` share each
    layer (tensor parallelism). All else that is `asked` is for vLLM's EngineArgs, and wins over ours. Raises ValueError
    for compiled code on a CPU, and what vLLM raises for a model that it cannot run.
    """
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        logits_processors=[DrawTokens],
        logprobs_mode="processed_logits",
        async_scheduling=False,  # a draw needs to know how many came before
        **engine_arguments(model, **asked),
    )
    with _restore_ld_preload():
        return LLMEngine.from_engine_args(arguments)


def _token_bytes(model: Path, dtype: str) -> int:
    """Bytes of keys and values of one token in all layers."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * size * getattr(torch, dtype).itemsize


@contextmanager
def _restore_ld_preload() -> Iterator[None]:
    """What vLLM has its own workers preload is nothing for other processes that we start later."""
    before = os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if before is not None:
            os.environ["LD_PRELOAD"] = before


class VllmEngine:
    """An `Engine` over `vllm`, which `open_vllm` has made; it owns it."""

    def __init__(self, vllm: LLMEngine) -> None:
        model, cache = vllm.model_config, vllm.vllm_config.cache_config
        with torch.device("meta"):
            self._shape = AutoModelForCausalLM.from_config(model.hf_config, dtype=model.dtype)
        self._vocabulary, self._context = model.get_vocab_size(), model.max_model_len
        self._slots = vllm.vllm_config.scheduler_config.max_num_seqs
        self._kv_capacity = (cache.num_gpu_blocks - 1) * cache.block_size
        self._vllm, self._core = vllm, vllm.engine_core
        self._scheduler = self._core.engine_core.scheduler
        self._asked: dict[str, _TrackedRequest] = {}
        self._done: list[Completion] = []
        self._started: list[str] = []
        self._tokens_generated = 0
        self._model_seconds = 0.0
        """Of vLLM's whole step, its scheduling included."""
        self._version: PolicyVersion | None = None
        self._status = self._look()

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""
        return self._version

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Replace the weights in place with the safetensors file `weights`, read by each worker; what the prefix cache
        has of the old ones goes. Raises as every engine does."""
        check_loadable(self.status(), version)
        check_weights(self._shape, weights, rounds=True)
        self._vllm.collective_rpc(load_worker_weights, args=(str(weights.absolute()),))
        self._forget_prefixes()
        self._version = version

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError as every engine does."""
        check_request(request, self._vocabulary, self._context)
        name = request.trajectory_id
        if name in self._asked or any(name == done.trajectory_id for done in self._done):
            raise ValueError(f"trajectory {name!r} is here already")
        reason = finished_reason(request, self._context)
        if reason is not None and request.partial is not None:
            self._done.append(Completion(name, request.partial, reason))
            self._status = self._look()
            return
        asked = _TrackedRequest(request)
        if request.partial is not None:
            asked.token_ids += request.partial.token_ids.tolist()
            asked.logprobs += request.partial.logprobs.tolist()
        self._add(asked)
        self._asked[name] = asked
        self._status = self._look()

    def step(self) -> Sequence[Completion]:
        """Run one round of vLLM and return what finished in it; an empty engine returns at once."""
        done, self._done = self._done, []
        if self._asked:
            began = time.thread_time()
            outputs = self._core.get_output()
            self._model_seconds += time.thread_time() - began
            if broken := [each.request_id for each in outputs.outputs if self._take(each, done)]:
                self._begin_anew(broken)
        self._status = self._look()
        return done

    def take_started(self) -> Sequence[str]:
        """Requests that were given their first token here since this was asked last, those that ended included."""
        started, self._started = self._started, []
        return started

    def due(self) -> float:
        """0 while there are requests, whose next tokens take as long as they take; infinite without."""
        return 0.0 if self._asked or self._done else math.inf

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return what each had generated, without KV; unknown ids are left out."""
        wanted = set(trajectory_ids)
        released = {done.trajectory_id: done.generated for done in self._done if done.trajectory_id in wanted}
        self._done = [done for done in self._done if done.trajectory_id not in wanted]
        here = [name for name in self._asked if name in wanted]
        self._core.abort_requests(here)
        released |= {name: self._asked.pop(name).partial() for name in here}
        self._status = self._look()
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """What these requests have generated from the position that `since` gives on; unknown ids are left out."""
        return {name: self._asked[name].partial(start) for name, start in since.items() if name in self._asked}

    def status(self) -> EngineStatus:
        """The load after the last call; may be asked by any thread."""
        return self._status

    def close(self) -> None:
        """Free what the engine holds; it cannot be used after, only closed again."""
        if (core := self.__dict__.get("_core")) is not None:
            core.shutdown()
        self.__dict__.clear()

    def _add(self, asked: _TrackedRequest) -> None:
        request = asked.request
        # vLLM's own way to here checks anew what has been checked, and copies the parameters.
        self._core.add_request(
            EngineCoreRequest(
                request_id=request.trajectory_id,
                prompt_token_ids=[*request.prompt.tolist(), *asked.token_ids],
                mm_features=None,
                sampling_params=self._params(request, len(asked.token_ids)),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def _begin_anew(self, broken: list[str]) -> None:
        """End the `broken` requests and let all others go on from what they have, in KV made anew: numbers that are not
        finite would spoil whoever is given their blocks next, or has the same prompt."""
        self._core.abort_requests([*broken, *self._asked])
        self._vllm.collective_rpc(clear_kv)
        self._forget_prefixes()
        for asked in self._asked.values():
            self._add(asked)

    def _forget_prefixes(self) -> None:
        if not self._vllm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache, in which nothing is right any more")

    def _take(self, output: EngineCoreOutput, done: list[Completion]) -> bool:
        """Enter what a request has gained; whether it has failed, mostly as its logits were not finite."""
        asked = self._asked.get(output.request_id)
        if asked is None:
            return False
        new = output.new_token_ids
        logprobs = [] if output.new_logprobs is None else [float(each[0]) for each in output.new_logprobs.logprobs]
        if new and not asked.began:
            asked.began = True
            self._started.append(output.request_id)
        if NOT_FINITE in logprobs or len(logprobs) != len(new) or output.finish_reason == FinishReason.ERROR:
            error = "logits that are not finite" if NOT_FINITE in logprobs else "vLLM failed the request"
            done.append(Completion(output.request_id, asked.partial(), "failed", error))
            del self._asked[output.request_id]
            return True
        asked.token_ids += new
        asked.logprobs += logprobs
        self._tokens_generated += len(new)
        if output.finish_reason is not None:
            reason = "stop" if output.finish_reason == FinishReason.STOP else "length"
            done.append(Completion(output.request_id, asked.partial(), reason))
            del self._asked[output.request_id]
        return False

    def _params(self, request: Request, known: int) -> SamplingParams:
        sampling = request.sampling
        key = stream_key(sampling.seed, request.trajectory_id)
        return SamplingParams(
            temperature=0.0,  # of what our draws leave
            max_tokens=generation_limit(request, self._context) - known,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args=draw_argument(key, known, sampling.temperature, sampling.top_k, sampling.top_p),
        )

    def _look(self) -> EngineStatus:
        running = len(self._scheduler.running)
        return EngineStatus(
            running=running,
            waiting=len(self._asked) + len(self._done) - running,
            capacity=self._slots,
            kv_used=round(self._scheduler.kv_cache_manager.usage * self._kv_capacity),
            kv_capacity=self._kv_capacity,
            tokens_generated=self._tokens_generated,
            model_seconds=self._model_seconds,
        )
