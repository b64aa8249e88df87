"""Tokens/s of one whole update: the learner beside a plain PyTorch loop over the same batch, padded.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer
    OMP_NUM_THREADS=1 python -m benchmarks.trainer --json

Both make one GRPO update of 128 sequences with the same model, loss, clipping, gradient norm and AdamW. The plain loop
is the simplest implementation: the batch as one padded tensor, cut into row blocks of about as many positions as the
learner's micro-batches have tokens, with logits of response positions only. Tokens exclude padding. The two alternate
in one run; figures are ratios of CPU seconds, medians of several updates. `outside` is the share of an update outside
the model's forward and backward passes over its micro-batches and the optimizer's step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.batches import training_batch
from benchmarks.tables import print_rows
from infra.models.checkpoint_folder import load_model, save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.trainer.batch import TrainingBatch, join_parts
from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.packing import micro_batches
from operators.trainer.policy import load_policy, token_logprobs
from pipelines.present.report.machine import describe_machine
from schemas.records import MicroBatch

GROUPS, SAMPLES, PROMPT = 16, 8, 9
CPU = torch.device("cpu")
LENGTHS = ("equal", "sums", "long-tailed")
"""Response tokens: 24 each; 23 ± 5, as in the demonstration; or log-normal with median 39, at most 400."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--repetitions", type=int, default=7)
    arguments.add_argument("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS)
    arguments.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096])
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_folder(*build_demo_model(DemoModelConfig(layers=2)), folder)
        rows = [
            measure(folder, kind, budget, options.repetitions) for kind in options.lengths for budget in options.budgets
        ]
    if options.json:
        print(json.dumps({"machine": describe_machine(), "updates": rows}, indent=1))
        return
    machine = describe_machine()
    print_rows(rows, f"One update of {GROUPS * SAMPLES} sequences, one thread of {machine['cpu']}", as_json=False)


def measure(folder: Path, kind: str, budget: int, repetitions: int) -> dict[str, float | str]:
    """Alternate both, and measure the model's share of the learner's update."""
    part = draw(kind)
    batch = join_parts([part])
    learner = Learner(LearnerConfig(micro_batch_tokens=budget), folder)
    updates: dict[str, Callable[[], object]] = {
        "learner": lambda: learner.update([part]),
        "plain": PlainLoop(folder, batch, budget).update,
        "model": ModelAlone(folder, batch, budget).update,
    }
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(repetitions + 1):
        for name, update in updates.items():
            began = time.process_time()
            update()
            seconds[name].append(time.process_time() - began)
    taken = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    outside = statistics.median(1 - m / u for m, u in zip(seconds["model"][1:], seconds["learner"][1:], strict=True))
    tokens = int(batch.lengths.sum())
    sys.stderr.write(f"{kind}, {budget}: seconds {taken}, outside {outside:.2f}\n")
    return {
        "lengths": kind,
        "budget": budget,
        "tokens": tokens,
        "learner tokens/s": tokens / taken["learner"],
        "plain tokens/s": tokens / taken["plain"],
        "ratio": statistics.median(p / u for p, u in zip(seconds["plain"][1:], seconds["learner"][1:], strict=True)),
        "outside": max(0.0, outside),
    }


def draw(kind: str) -> MicroBatch:
    """A batch in which every sequence has an advantage."""
    source = np.random.default_rng(0)
    count = GROUPS * SAMPLES
    responses = {
        "equal": np.full(count, 24),
        "sums": source.normal(23, 5, count).clip(4, 41).astype(int),
        "long-tailed": source.lognormal(np.log(39), 0.9, count).clip(4, 400).astype(int),
    }[kind]
    lengths = responses + PROMPT
    token_ids = np.split(source.integers(2, 250, lengths.sum()), lengths.cumsum()[:-1])
    logprobs = [np.where(np.arange(length) >= PROMPT, -5.5, 0) for length in lengths]
    return training_batch(token_ids, PROMPT, logprobs, np.tile([0.0, 1.0], count // 2), group=SAMPLES)


class PlainLoop:
    """GRPO in plain PyTorch. Tensors that are the same for every update are built before the measurement."""

    def __init__(self, folder: Path, batch: TrainingBatch, budget: int) -> None:
        self.model = load_model(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, fused=True)
        count, width = len(batch), int(batch.lengths.max())
        self.rows = max(1, budget // width)
        self.token_ids, self.mask = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, width)
        self.behaviour = torch.zeros(count, width)
        for row, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
            self.token_ids[row, :length] = torch.from_numpy(batch.token_ids[start : start + length])
            self.mask[row, :length] = torch.from_numpy(batch.loss_mask[start : start + length]).float()
            self.behaviour[row, :length] = torch.from_numpy(batch.behaviour[start : start + length])
        self.rewards = torch.from_numpy(batch.rewards).float().view(GROUPS, SAMPLES)

    def update(self) -> None:
        """Make one step. Padding is on the right, so a causal model needs no mask."""
        advantages = (self.rewards - self.rewards.mean(1, keepdim=True)) / (self.rewards.std(1, keepdim=True) + 1e-6)
        advantages = advantages.view(-1, 1)
        self.optimizer.zero_grad()
        for first in range(0, len(self.mask), self.rows):
            rows = slice(first, first + self.rows)
            ids, mask = self.token_ids[rows], self.mask[rows, PROMPT:]
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
            logprobs = self.model.get_output_embeddings()(hidden).log_softmax(-1)
            current = logprobs.gather(2, ids[:, PROMPT:, None])[..., 0]
            ratios = (current - self.behaviour[rows, PROMPT:]).exp()
            own = advantages[rows]
            losses = -torch.minimum(ratios * own, ratios.clamp(0.8, 1.28) * own) * mask
            torch.autograd.backward((losses.sum(1) / mask.sum(1)).sum() / len(self.mask))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class ModelAlone:
    """Forward and backward passes over the learner's micro-batches, and a step, without loss, metrics and checks."""

    def __init__(self, folder: Path, batch: TrainingBatch, budget: int) -> None:
        self.model = load_policy(folder, CPU).model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, fused=True)
        self.parts = list(micro_batches(batch, np.arange(len(batch)), budget, CPU))

    def update(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        for part in self.parts:
            logprobs, _ = token_logprobs(self.model, part.packed, 1 << 20)
            torch.autograd.backward(logprobs.sum())
        self.optimizer.step()


if __name__ == "__main__":
    main()
