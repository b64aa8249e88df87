"""Batches and models for the trainer's tests: small, seeded, every row different."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from schemas import columns
from schemas.records import MicroBatch

TINY = DemoModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48, max_positions=64)


def save_tiny_model(folder: Path, seed: int = 0, scale: float = 3.0, shape: DemoModelConfig = TINY) -> Path:
    """Save a model whose weights are large enough for predictions to differ between tokens."""
    model, tokenizer = build_demo_model(replace(shape, seed=seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_experts(folder: Path) -> None:
    """Save a mixture of four experts with the tiny model's vocabulary."""
    vocabulary = json.loads((folder.with_name("model") / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        max_position_embeddings=128,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def make_batch(
    seed: int = 0, groups: int = 4, samples: int = 4, number: int = 0, parts: int = 1, longest: int = 20
) -> list[MicroBatch]:
    """A batch of `groups` × `samples` sequences with different lengths and temperatures; some tokens are untrained."""
    source = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        prompt = source.integers(2, 200, source.integers(1, 6))
        for sample in range(samples):
            response = source.integers(2, 200, source.integers(2, longest))
            rows.append((f"p{group + 100 * number}.{sample}", prompt, response, float(source.random() < 0.5)))
    source.shuffle(rows)
    return [pack_rows(rows[part::parts], source, batch=number, index=part, count=parts) for part in range(parts)]


def pack_rows(
    rows: list[tuple[str, np.ndarray, np.ndarray, float]],
    source: np.random.Generator,
    batch: int = 0,
    index: int = 0,
    count: int = 1,
) -> MicroBatch:
    """The record of `rows`: trajectory id, prompt, response and reward."""
    masks = [np.r_[np.zeros(len(p), bool), source.random(len(r)) < 0.9] for _, p, r, _ in rows]
    logprobs = [np.where(mask, -5 - source.random(len(mask)), 0) for mask in masks]
    count_of_rows = len(rows)
    return MicroBatch(
        batch=batch,
        index=index,
        count=count,
        rank=0,
        token_ids=columns.token_ids(np.concatenate([np.r_[p, r] for _, p, r, _ in rows]).astype(np.int32)),
        logprobs=columns.floats(np.concatenate(logprobs)),
        loss_mask=columns.flags(np.concatenate(masks)),
        lengths=columns.integers([len(p) + len(r) for _, p, r, _ in rows]),
        prompt_lengths=columns.integers([len(p) for _, p, _, _ in rows]),
        rewards=columns.floats([reward for *_, reward in rows]),
        temperatures=columns.floats([(1.0, 0.7, 1.3)[i % 3] for i in range(count_of_rows)]),
        truncated=columns.flags([i % 4 == 0 for i in range(count_of_rows)]),
        trajectory_ids=tuple(name for name, *_ in rows),
        version_epochs=columns.integers([int(i % 3 == 0) for i in range(count_of_rows)]),  # the others are as imported
        version_numbers=columns.integers([batch] * count_of_rows),
        staleness=columns.integers([i % 3 for i in range(count_of_rows)]),
        lineage_partitions=columns.integers([0] * count_of_rows),
        lineage_offsets=columns.integers(range(count_of_rows)),
        breaks=columns.integers([]),
        context_rewards=columns.floats([]),
    )


def with_floats(row: MicroBatch, column: str, changes: dict[int, float]) -> MicroBatch:
    """`row` with some values of its float column `column` changed."""
    values = getattr(row, column).to_numpy(zero_copy_only=False).copy()
    for place, value in changes.items():
        values[place] = value
    return replace(row, **{column: columns.floats(values)})
