"""The learner beside a plain PyTorch loop over the same sequences, in bfloat16 and float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.batches import GROUP, batch_of
from benchmarks.gpu.figures import Figure, busy, peak_bytes, seconds
from benchmarks.gpu.settings import GIB, Settings
from infra.models.checkpoint_folder import load_model
from operators.trainer import packed_attention
from operators.trainer.config import LearnerConfig, Precision
from operators.trainer.learner import Learner
from operators.trainer.memory_plan import plan_memory, shape_of
from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.token_scores import has_kernels

FLOAT32_SHARE = 4
"""Float32 trains one sequence of so many: it is many times slower."""


def learner_bfloat16(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations, and which kernel computes its attention."""
    return _update(settings, model, "bfloat16", names_attention=True)


def learner_sdpa(settings: Settings, model: Path) -> list[Figure]:
    """As `learner_bfloat16`, by torch's attention where flash-attn's would be chosen."""
    if packed_attention._installed() is None:
        return [Figure("trained", math.nan, "", note="no flash-attn: learner, bfloat16 is by torch's attention")]
    packed_attention.varlen_kernel = lambda query: None
    return _update(settings, model, "bfloat16", names_attention=True)


def learner_float32(settings: Settings, model: Path) -> list[Figure]:
    """An update in float32."""
    return _update(settings, model, "float32")


def learner_any_order(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations by kernels that may add in any order: what deterministic ones cost."""
    return _update(settings, model, "bfloat16", deterministic=False)


def learner_checkpointing(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations that are recomputed in the backward pass."""
    return _update(settings, model, "bfloat16", gradient_checkpointing=True)


def learner_offloaded(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations and the optimizer's moments in host memory between two updates."""
    return _update(settings, model, "bfloat16", offload=("moments",))


def learner_one_rank(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations by FSDP2 on a mesh of one rank, over NCCL on a GPU: what sharding costs."""
    return _one_rank(settings, model)


def learner_kept_gathered(settings: Settings, model: Path) -> list[Figure]:
    """As `learner_one_rank`, with layers that stay gathered for all micro-batches of an optimizer step."""
    return _one_rank(settings, model, keep_gathered=True)


def _one_rank(settings: Settings, model: Path, **options: Any) -> list[Figure]:
    backend = "gloo" if settings.device == "cpu" else f"cpu:gloo,{settings.device}:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _update(settings, model, "bfloat16", ranks=OneRank(), **options)
    finally:
        dist.destroy_process_group()


class OneRank(Ranks):
    """A single rank that shards the model nevertheless, as each of several ranks does."""

    def open_mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh of this rank."""
        return init_device_mesh(device.type, (1,))


def plain_bfloat16(settings: Settings, model: Path) -> list[Figure]:
    """The plain loop under autocast."""
    return _plain(settings, model, "bfloat16")


def plain_float32(settings: Settings, model: Path) -> list[Figure]:
    """The plain loop in float32."""
    return _plain(settings, model, "float32")


def learner_config(settings: Settings, precision: Precision, **options: Any) -> LearnerConfig:
    """The learner's configuration with further `options`."""
    return LearnerConfig(
        precision=precision,
        micro_batch_tokens=settings.micro_batch_tokens,
        logits_chunk_tokens=settings.micro_batch_tokens // 2,
        learning_rate=1e-6,
        **options,
    )


def _sequences(settings: Settings, precision: Precision) -> int:
    share = FLOAT32_SHARE if precision == "float32" else 1
    return max(GROUP, settings.sequences // share)


def _update(
    settings: Settings,
    model: Path,
    precision: Precision,
    *,
    ranks: Ranks = ALONE,
    names_attention: bool = False,
    **options: Any,
) -> list[Figure]:
    """Tokens/s of an update, and the most memory it took beside the formula's."""
    config = learner_config(settings, precision, **options)
    learner = Learner(config, model, settings.device, ranks)
    part = batch_of(_sequences(settings, precision), settings.length, int(settings.shape.config["vocab_size"]))
    took = seconds(settings.device, lambda: learner.update([part]), settings.repetitions)
    planned, peak = plan_memory(shape_of(model), 1, config).total, peak_bytes(settings.device)
    note = ""
    if names_attention:
        with _AttentionKernels() as kernels:
            learner.update([part])
        scored = "kernels" if has_kernels(torch.device(settings.device)) else "torch"
        note = f"{', '.join(sorted(kernels.names)) or 'attention without a fused kernel'}; scores by {scored}"
    figures = [Figure("trained", len(part.trajectory_ids) * settings.length / took, "tokens/s", note=note)]
    if peak:
        figures += [
            Figure("peak memory", peak / GIB, "GiB"),
            Figure("peak memory over the formula", peak / planned, "", ("<=", 1.0), f"{planned / GIB:.1f} GiB planned"),
        ]
    return figures + busy(settings.device, lambda: learner.update([part]))


class _AttentionKernels(TorchDispatchMode):
    """Records which kernels compute attention in the forward passes of its context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, after its name is noted if it is an attention."""
        name = str(func.name()).partition("::")[2].partition(".")[0].strip("_")
        if ("attention" in name or "flash_attn" in name) and "backward" not in name:
            self.names.add(name.removeprefix("scaled_dot_product_").removesuffix("_for_cpu"))
        return func(*args, **(kwargs or {}))


def _plain(settings: Settings, model: Path, precision: Precision) -> list[Figure]:
    loop = _PlainLoop(settings, model, precision)
    took = seconds(settings.device, loop.update, settings.repetitions)
    figures = [Figure("trained", len(loop.token_ids) * settings.length / took, "tokens/s")]
    peak = peak_bytes(settings.device)
    figures += [Figure("peak memory", peak / GIB, "GiB")] if peak else []
    return figures + busy(settings.device, loop.update)


class _PlainLoop:
    """The clipped policy gradient in plain PyTorch: rows of equal length, no packing, no metrics."""

    def __init__(self, settings: Settings, model: Path, precision: Precision) -> None:
        self._model = load_model(model).to(settings.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        self._device, self._precision, self._length = settings.device, precision, settings.length
        self._rows = max(1, settings.micro_batch_tokens // settings.length)
        source = np.random.default_rng(0)
        drawn = source.integers(1, 500, (_sequences(settings, precision), settings.length))
        self.token_ids = torch.from_numpy(drawn).to(settings.device)
        self._advantages = torch.tensor([-1.0, 1.0], device=settings.device).repeat(len(drawn) // 2)[:, None]

    def update(self) -> None:
        """One optimizer step."""
        half = self._length // 2
        self._optimizer.zero_grad()
        for first in range(0, len(self.token_ids), self._rows):
            ids, advantages = self.token_ids[first : first + self._rows], self._advantages[first : first + self._rows]
            with torch.autocast(self._device, torch.bfloat16, enabled=self._precision == "bfloat16"):
                hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, half - 1 : -1]
                logits = self._model.get_output_embeddings()(hidden)
            logprobs = logits.float().log_softmax(-1).gather(2, ids[:, half:, None])[..., 0]
            ratios = (logprobs - logprobs.detach()).exp()
            losses = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            torch.autograd.backward(losses.mean() * len(ids) / len(self.token_ids))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
