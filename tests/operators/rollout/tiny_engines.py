"""Engines over tiny random models, and requests to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record_factories import version
from tiny_models import CONTEXT, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from operators.rollout.draft_lengths import ForwardCost
from operators.rollout.engine import Completion, Engine, PartialResponse, Request
from operators.rollout.forward_runner import kv_geometry
from operators.rollout.kv_slots import KVSlots
from operators.rollout.speculation import Speculator
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import PolicyVersion, Sampling


def engine(family: str = "qwen2", slots: int = 8, dtype: str = "float32", **options: Any) -> TransformersEngine:
    return TransformersEngine(tiny_model(family).to(getattr(torch, dtype)), slots=slots, **options)


def speculating(family: str = "qwen2", **options: Any) -> TransformersEngine:
    """An engine for which every draft pays, whatever this machine's passes cost."""
    it = engine(family, speculation=True, **options)
    it._speculator = Speculator(ForwardCost(np.array([1, 512]), np.ones(2), np.ones(2)))
    return it


def kv_slots(model: PreTrainedModel, geometry: tuple[int, int, int] | None = None, rows: int = 8) -> KVSlots:
    """KV slots for `model`; its geometry (layers, KV heads, head size) is measured by default."""
    layers, heads, size = geometry or kv_geometry(model)
    return KVSlots(
        layers=layers,
        rows=rows,
        heads=heads,
        context=CONTEXT,
        head_size=size,
        dtype=model.dtype,
        device=model.device,
    )


def request(i: int, new: int = 12, prompt: int = 6, stops: tuple[int, ...] = (), **sampling: Any) -> Request:
    tokens = np.random.default_rng(i // 3).integers(0, VOCABULARY, prompt).astype(np.int32)
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | sampling
    return Request(f"p{i // 3}.{i % 3}", tokens, Sampling(**drawn, max_new_tokens=new, stop_token_ids=stops, seed=3))


def mixed(count: int) -> list[Request]:
    """Groups of three that share a prompt; prompts, lengths and sampling of all kinds."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}]
    return [request(i, new=3 + 7 * i % 40, prompt=1 + 5 * (i // 3) % 17, **kinds[i % 5]) for i in range(count)]


def run(it: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    for one in requests:
        it.submit(one)
    done: dict[str, Completion] = {}
    while it.status().running or it.status().waiting:
        for completion in it.step():
            assert completion.trajectory_id not in done
            done[completion.trajectory_id] = completion
    return done


def plain_logprobs(of: PreTrainedModel, one: Request, generated: PartialResponse) -> np.ndarray:
    """Logprobs of `generated` under its sampling distribution, by one forward over prompt and response."""
    ids = torch.from_numpy(np.concatenate([one.prompt, generated.token_ids]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = of(input_ids=ids).logits[0, len(one.prompt) - 1 : -1].float()
    logprobs = torch.stack([drawn_from(row, one.sampling) for row in logits])
    return logprobs.gather(1, ids[0, len(one.prompt) :, None])[:, 0].numpy()


def drawn_from(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logprobs [vocabulary] of the distribution that `sampling` draws from; for greedy the plain distribution."""
    scores = logits / (sampling.temperature or 1.0)
    if sampling.temperature:
        ranking = scores.argsort(descending=True)[: sampling.top_k or None]
        before = scores[ranking].softmax(-1).cumsum(-1) - scores[ranking].softmax(-1)
        kept = ranking[before < sampling.top_p]
        scores = torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept])
    return scores.log_softmax(-1)


def assert_same(one: Completion, other: Completion) -> None:
    assert one.generated.token_ids.tolist() == other.generated.token_ids.tolist()
    assert np.abs(one.generated.logprobs - other.generated.logprobs).max() < 1e-4
    assert one.finish_reason == other.finish_reason


class OnDisk:
    """A single weights file, with the version last written."""

    def __init__(self, file: Path) -> None:
        self._file, self.held = file, [version(0)]

    def versions(self) -> list[PolicyVersion]:
        return self.held

    def pin(self, version: PolicyVersion) -> AbstractContextManager[Path]:
        return nullcontext(self._file)
