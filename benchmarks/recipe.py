"""Accuracy of a demonstration's recipe: warm start, then reinforcement learning in a plain loop, seed by seed.

    OMP_NUM_THREADS=1 python benchmarks/recipe.py examples/chain_sum.toml --seeds 0 1 2

Without Kafka and Beam: generate a batch, score it, update, repeat, with the same engine, learner and questions as a
run. A run that learns less than this loop has a defect in its pipelines. `--lag k` trains every batch k updates late.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.models.checkpoint_folder import load_model, load_tokenizer
from infra.models.weights import save_weights
from operators.prompts.config import PromptsConfig
from operators.prompts.question import Question
from operators.prompts.sources import heldout_questions, open_source
from operators.rollout.engine import Completion, Request
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.learner import Learner
from operators.trainer.warm_start import answer_of, warm_start
from operators.trainer.warm_start_record import WarmStart
from pipelines.config import Config, load_config
from pipelines.run.warm_start import warm_start_questions
from schemas import columns
from schemas.identity import trajectory_id
from schemas.records import MicroBatch, PolicyVersion, Sampling


@dataclass
class Loop:
    """The engine, the learner, and the held-out questions."""

    config: Config
    folder: Path
    scratch: Path

    def __post_init__(self) -> None:
        self.tokenizer = load_tokenizer(self.folder)
        self.learner = Learner(self.config.trainer.learner, self.folder)
        self.engine = self.new_engine(speculation=self.config.rollout.speculation)
        self.engine_steps = 0
        self.heldout_questions = heldout_questions(self.config.prompts)
        self.heldout = [question.reference for question in self.heldout_questions]

    def new_engine(self, *, speculation: bool) -> TransformersEngine:
        """An engine with the settings of a rollout."""
        rollout = self.config.rollout
        return TransformersEngine(
            load_model(self.folder, getattr(torch, rollout.weights_dtype)),
            slots=rollout.most_slots,
            context=rollout.context,
            kv_capacity=rollout.kv_capacity,
            speculation=speculation,
        )

    def load(self, update: int) -> None:
        """Load the weights after `update` updates into the engine."""
        self.engine.load(self.weights(update), PolicyVersion(1, update))

    def weights(self, update: int) -> Path:
        """The file of the weights after `update` updates."""
        return self.scratch / f"{update}.safetensors"

    def answers(self, entries: Sequence[Any], samples: int, temperature: float, seed: int) -> list[Completion]:
        """`samples` answers to each of `entries`, in the order of the entries."""
        stop = (int(self.tokenizer.eos_token_id),)
        sampling = Sampling(temperature, 1.0, 0, self.config.prompts.max_new_tokens, stop, seed)
        names = []
        for number, entry in enumerate(entries):
            prompt = np.array(self.tokenizer.encode(entry["question"]), np.int32)
            for member in range(samples):
                names.append(trajectory_id("train", number, member))
                self.engine.submit(Request(names[-1], prompt, sampling))
        done: dict[str, Completion] = {}
        while len(done) < len(names):
            done |= {completion.trajectory_id: completion for completion in self.engine.step()}
            self.engine_steps += 1
        return [done[name] for name in names]

    def rewards(self, completions: Sequence[Completion], entries: Sequence[Any], samples: int) -> list[float]:
        """1 for each correct answer, otherwise 0."""
        texts = self.tokenizer.batch_decode([c.generated.token_ids for c in completions], skip_special_tokens=True)
        expected = [entry["answer"] for entry in entries for _ in range(samples)]
        return [float(answer_of(text) == answer) for text, answer in zip(texts, expected, strict=True)]

    def accuracy(self, update: int, temperature: float) -> float:
        """Accuracy on held-out questions after `update` updates."""
        self.load(update)
        return float(np.mean(self.rewards(self.answers(self.heldout, 1, temperature, 0), self.heldout, 1)))

    def pack(
        self, batch: int, entries: Sequence[Any], done: Sequence[Completion], rewards: Sequence[float]
    ) -> MicroBatch:
        """The batch, as the experience pipeline builds it."""
        samples = len(done) // len(entries)
        prompts = [np.array(self.tokenizer.encode(e["question"]), np.int32) for e in entries for _ in range(samples)]
        generated = [completion.generated for completion in done]
        rows = list(zip(prompts, generated, strict=True))
        zeros = columns.integers([0] * len(rows))
        return MicroBatch(
            batch=batch,
            index=0,
            count=1,
            rank=0,
            token_ids=columns.token_ids(np.concatenate([np.r_[p, g.token_ids] for p, g in rows])),
            logprobs=columns.floats(np.concatenate([np.r_[np.zeros(len(p)), g.logprobs] for p, g in rows])),
            loss_mask=columns.flags(np.concatenate([np.arange(len(p) + len(g.token_ids)) >= len(p) for p, g in rows])),
            lengths=columns.integers([len(p) + len(g.token_ids) for p, g in rows]),
            prompt_lengths=columns.integers([len(p) for p in prompts]),
            rewards=columns.floats(rewards),
            temperatures=columns.floats([self.config.prompts.temperature] * len(rows)),
            truncated=columns.flags([completion.finish_reason == "length" for completion in done]),
            trajectory_ids=tuple(completion.trajectory_id for completion in done),
            version_epochs=zeros,
            version_numbers=zeros,
            staleness=zeros,
            lineage_partitions=zeros,
            lineage_offsets=columns.integers(range(len(rows))),
            breaks=columns.integers([]),
            context_rewards=columns.floats([]),
        )


def main() -> None:
    """Run every seed and print its results."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--lag", type=int, default=0, help="updates between a batch's weights and its training")
    arguments.add_argument("--heldout", type=int, default=512)
    arguments.add_argument("--cache", type=Path, default=Path("runs/warm-starts"))
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        changes = [f"run.seed={seed}", f"warm_start.model.seed={seed}", f"prompts.heldout={options.heldout}"]
        changes += [f"warm_start.measured={options.heldout}", *options.set]
        run_seed(seed, load_config(options.config, changes), options.lag, options.cache)


@dataclass(frozen=True)
class Outcome:
    """The result of one seed: accuracies on `questions` held-out questions, and the rewards of batches."""

    start: WarmStart
    greedy: tuple[float, float]
    """Before and after."""
    sampled: tuple[float, float]
    questions: int
    rewards: tuple[float, ...]
    """The mean reward of each batch, in order."""


def run_seed(seed: int, config: Config, lag: int, cache: Path) -> Outcome:
    """Run one warm start and its reinforcement learning; print progress."""
    started, busy = time.monotonic(), time.process_time()
    start = make_start(config, cache)
    curve = "  ".join(f"{m.step}: {m.greedy:.3f}/{m.sampled:.3f}" for m in start.curve)
    print(f"seed {seed}: warm start {start.seconds:.0f} s (now {time.monotonic() - started:.0f} s, ", end="")
    print(f"CPU {time.process_time() - busy:.0f} s), teachers {start.teacher:.3f}; greedy/sampled {curve}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        loop = Loop(config, start.folder, Path(scratch))
        rewards = reinforce(loop, seed, lag)
        last = loop.learner.updates
        greedy, sampled = ((loop.accuracy(0, each), loop.accuracy(last, each)) for each in (0.0, 1.0))
    questions = len(loop.heldout)
    after = greedy[1]
    error = 2 * math.sqrt((after * (1 - after) + start.best * (1 - start.best)) / questions)
    print(f"  held-out greedy {greedy[0]:.3f} -> {after:.3f}, sampled {sampled[0]:.3f} -> {sampled[1]:.3f} ", end="")
    print(f"({questions} questions); best supervised checkpoint {start.best:.3f} greedy, ", end="")
    sampled_best = max(each.sampled for each in start.curve)
    print(f"{sampled_best:.3f} sampled; above it by {after - start.best:+.3f} (2 s.e. {error:.3f})", flush=True)
    return Outcome(start, greedy, sampled, questions, rewards)


def make_start(config: Config, cache: Path) -> WarmStart:
    """The warm start that a run of `config` makes."""
    assert config.warm_start is not None
    entries, heldout = warm_start_questions(config)
    return warm_start(config.warm_start, entries, heldout, cache)


def reinforce(loop: Loop, seed: int, lag: int) -> tuple[float, ...]:
    """Run all optimizer steps, printing every tenth; return the mean reward of each batch."""
    config = loop.config
    samples = config.prompts.samples_per_prompt
    prompts = config.experience.global_batch // samples
    questions = numbered_questions(config.prompts)
    generating = training = 0.0
    steps: list[dict[str, float]] = []
    save_weights(loop.learner.model, loop.weights(0))
    for step in range(config.trainer.optimizer_steps):
        started = time.process_time()
        loop.load(max(0, step - lag))
        entries = [question.reference for question in itertools.islice(questions, prompts)]
        done = loop.answers(entries, samples, config.prompts.temperature, seed * 1_000_000 + step)
        batch = loop.pack(step, entries, done, loop.rewards(done, entries, samples))
        generating += time.process_time() - started
        started = time.process_time()
        steps.append(loop.learner.update([batch]))
        training += time.process_time() - started
        save_weights(loop.learner.model, loop.weights(step + 1))
        if (step + 1) % 10 == 0:
            mean = _means(steps[-10:])
            print(
                f"  {step + 1:4d}  reward {mean['reward/mean']:.3f}  length {mean['response_length/mean']:.1f} "
                f"(max {max(m['response_length/max'] for m in steps[-10:]):.0f})  entropy {mean['entropy']:.3f}  "
                f"gradient {mean['grad_norm']:.2f}  ess {mean['ess']:.3f}  skipped {mean['batch/skipped_rows']:.0f}  "
                f"CPU s a step: generation {generating / (step + 1):.3f}, training {training / (step + 1):.3f}",
                flush=True,
            )
    return tuple(metrics["reward/mean"] for metrics in steps)


def _means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means by name. A batch in which no row has an advantage lacks the metrics of tokens."""
    names = {name for metrics in steps for name in metrics}
    return {name: float(np.mean([metrics[name] for metrics in steps if name in metrics])) for name in names}


def numbered_questions(prompts: PromptsConfig) -> Iterator[Question]:
    """The questions of `prompts` in the order of a run, without end."""
    source = open_source(prompts)
    return (source[number] for number in itertools.count())


if __name__ == "__main__":
    main()
