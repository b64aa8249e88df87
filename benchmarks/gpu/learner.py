"""The learner beside a plain PyTorch loop over the same sequences, in bfloat16 and float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.figures import Figure, peak_bytes, seconds
from benchmarks.gpu.settings import GIB, Settings
from infra.models.checkpoint_folder import load_model
from operators.trainer.config import LearnerConfig, Precision
from operators.trainer.learner import Learner
from operators.trainer.memory_plan import plan_memory, shape_of
from schemas.identity import trajectory_id
from schemas.records import MicroBatch

GROUP = 4
FLOAT32_SHARE = 4
"""Float32 trains one sequence of so many: it is many times slower."""


def learner_bfloat16(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations."""
    return _update(settings, model, "bfloat16")


def learner_float32(settings: Settings, model: Path) -> list[Figure]:
    """An update in float32."""
    return _update(settings, model, "float32")


def learner_checkpointing(settings: Settings, model: Path) -> list[Figure]:
    """An update with bfloat16 activations that are recomputed in the backward pass."""
    return _update(settings, model, "bfloat16", checkpointing=True)


def plain_bfloat16(settings: Settings, model: Path) -> list[Figure]:
    """The plain loop under autocast."""
    return _plain(settings, model, "bfloat16")


def plain_float32(settings: Settings, model: Path) -> list[Figure]:
    """The plain loop in float32."""
    return _plain(settings, model, "float32")


def learner_config(settings: Settings, precision: Precision, *, checkpointing: bool = False) -> LearnerConfig:
    """The learner's configuration."""
    return LearnerConfig(
        precision=precision,
        gradient_checkpointing=checkpointing,
        micro_batch_tokens=settings.micro_batch_tokens,
        logits_chunk_tokens=settings.micro_batch_tokens // 2,
        learning_rate=1e-6,
    )


def batch_of(sequences: int, length: int, vocabulary: int) -> MicroBatch:
    """A batch of sequences of `length` tokens, half of them trained, in groups whose rewards differ.

    Its logprobs are those of a model that finds all tokens of the vocabulary equally likely.
    """
    source = np.random.default_rng(0)
    masks = np.tile(np.arange(length) >= length // 2, sequences)
    zeros = np.zeros(sequences, np.int64)
    values: dict[str, Any] = {
        "token_ids": source.integers(1, 500, sequences * length).astype(np.int32),
        "logprobs": np.where(masks, -np.log(vocabulary), 0.0).astype(np.float32),
        "loss_mask": masks,
        "lengths": np.full(sequences, length),
        "prompt_lengths": np.full(sequences, length // 2),
        "rewards": np.tile([0.0, 1.0], sequences // 2),
        "temperatures": np.ones(sequences, np.float32),
        "truncated": zeros.astype(bool),
        **dict.fromkeys(("version_epochs", "version_numbers", "staleness"), zeros),
        **dict.fromkeys(("lineage_partitions", "lineage_offsets"), zeros),
        "breaks": np.empty(0, np.int64),
        "context_rewards": np.empty(0, np.float32),
    }
    columns: dict[str, Any] = {name: _Column(each) for name, each in values.items()}
    names = tuple(trajectory_id("train", i // GROUP, i % GROUP) for i in range(sequences))
    return MicroBatch(batch=0, index=0, count=1, rank=0, trajectory_ids=names, **columns)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a record, without pyarrow."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def to_numpy(self, **_: object) -> np.ndarray:
        """The values."""
        return self.values

    def to_pylist(self) -> list[Any]:
        """The values as a list."""
        return list(self.values.tolist())


def _sequences(settings: Settings, precision: Precision) -> int:
    share = FLOAT32_SHARE if precision == "float32" else 1
    return max(GROUP, settings.sequences // share)


def _update(settings: Settings, model: Path, precision: Precision, *, checkpointing: bool = False) -> list[Figure]:
    """Tokens/s of an update, and the most memory it took beside the formula's."""
    config = learner_config(settings, precision, checkpointing=checkpointing)
    learner = Learner(config, model, settings.device)
    part = batch_of(_sequences(settings, precision), settings.length, int(settings.shape.config["vocab_size"]))
    took = seconds(settings.device, lambda: learner.update([part]), settings.repetitions)
    planned, peak = plan_memory(shape_of(model), 1, config).total, peak_bytes(settings.device)
    figures = [Figure("trained", len(part.trajectory_ids) * settings.length / took, "tokens/s")]
    if peak:
        figures += [
            Figure("peak memory", peak / GIB, "GiB"),
            Figure("peak memory over the formula", peak / planned, "", ("<=", 1.0), f"{planned / GIB:.1f} GiB planned"),
        ]
    return figures


def _plain(settings: Settings, model: Path, precision: Precision) -> list[Figure]:
    loop = _PlainLoop(settings, model, precision)
    took = seconds(settings.device, loop.update, settings.repetitions)
    figures = [Figure("trained", len(loop.token_ids) * settings.length / took, "tokens/s")]
    peak = peak_bytes(settings.device)
    return [*figures, Figure("peak memory", peak / GIB, "GiB")] if peak else figures


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
