"""Lossless speculation in the long tail: recipe B's batches with and without it, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.speculation [--questions 0] [--epochs 4] [--tail 16] [--json]

Trains recipe B (examples/gcd.toml) in a plain loop. Two engines with the same weights generate every batch in turn, one
with speculation; their tokens and logprobs are compared, and those of the first are trained. A step is of the tail if
at most `tail` trajectories run. Without `questions` the run has fresh questions, as the recipe, and its batches are
divided in so many parts; with it the same questions are trained in every epoch. Seconds are CPU seconds of the thread.
Last, an emulated 32B replica generates batches of the last epoch's lengths, times 32, without speculation and with the
acceptance of each epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.recipe import Loop, make_start, numbered_questions
from infra.models.weights import save_weights
from operators.rollout.emulated_engine import EmulatedEngine, emulated_scheduling
from operators.rollout.emulation_config import DEFAULT_CONTEXT, EngineEmulation, RooflineConfig, SpeculationEmulation
from operators.rollout.engine import Completion, Engine, Request
from operators.rollout.roofline import Roofline
from operators.rollout.speculation import Counts
from pipelines.config import load_config
from pipelines.present.report.machine import describe_machine
from schemas.identity import trajectory_id
from schemas.records import PolicyVersion, Sampling

EXAMPLE = Path(__file__).parents[1] / "examples" / "gcd.toml"
STRIDE = 32
"""Tokens of the 32B model for each token of the recipe: its p50 is then about that of long reasoning."""


@dataclass
class Pace:
    """Tokens and seconds (CPU seconds of the thread) of all steps, and of those of the tail."""

    tokens: int = 0
    seconds: float = 0.0
    tail_tokens: int = 0
    tail_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of all steps."""
        return self.tokens / self.seconds

    @property
    def tail_rate(self) -> float:
        """Tokens per second of the tail."""
        return self.tail_tokens / self.tail_seconds


@dataclass(frozen=True)
class Emulated:
    """Emulated seconds of a batch, and of its tail."""

    seconds: float
    tail_seconds: float


@dataclass
class Epoch:
    """One pass over the questions: paces with and without speculation, its drafts, and the responses that differ."""

    plain: Pace = field(default_factory=Pace)
    speculating: Pace = field(default_factory=Pace)
    counts: Counts = field(default_factory=Counts)
    responses: int = 0
    other_tokens: int = 0
    """Responses with other tokens than without speculation."""
    other_logprobs: int = 0
    """Tokens whose logprob differs in any bit, of responses with equal tokens."""
    reward: float = 0.0


def generate(engine: Engine, requests: Sequence[Request], tail: int, pace: Pace) -> list[Completion]:
    """The completions of `requests`, in their order; adds to `pace`."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Completion] = {}
    generated = engine.status().tokens_generated
    while len(done) < len(requests):
        rows = len(requests) - len(done)
        began = time.thread_time()
        done |= {completion.trajectory_id: completion for completion in engine.step()}
        seconds = time.thread_time() - began
        tokens = engine.status().tokens_generated - generated
        generated += tokens
        pace.tokens += tokens
        pace.seconds += seconds
        if rows <= tail:
            pace.tail_tokens += tokens
            pace.tail_seconds += seconds
    return [done[request.trajectory_id] for request in requests]


class Training:
    """Recipe B in a plain loop, whose batches two engines generate."""

    def __init__(self, loop: Loop, tail: int) -> None:
        self.loop, self.tail = loop, tail
        self.plain, self.speculating = (loop.new_engine(speculation=each) for each in (False, True))
        self.step = 0
        self.lengths: list[dict[str, Any]] = []
        """Question, batch and length of every response, in order."""
        save_weights(loop.learner.model, loop.weights(0))

    def epoch(self, entries: Sequence[Any]) -> Epoch:
        """Train all `entries` once."""
        found, config = Epoch(), self.loop.config
        prompts = config.experience.global_batch // config.prompts.samples_per_prompt
        before = self.speculating.speculation
        rewards: list[float] = []
        for first in range(0, len(entries), prompts):
            rewards += self._batch(entries[first : first + prompts], found)
        found.reward = float(np.mean(rewards))
        found.counts = self.speculating.speculation.since(before)
        return found

    def _batch(self, entries: Sequence[Any], found: Epoch) -> list[float]:
        """Generate one batch with both engines, compare, and train; the rewards."""
        loop, samples = self.loop, self.loop.config.prompts.samples_per_prompt
        version, file = PolicyVersion(1, self.step), loop.weights(self.step)
        requests = self._requests(entries)
        for engine in (self.plain, self.speculating):
            engine.load(file, version)
        sides = [(self.plain, found.plain), (self.speculating, found.speculating)]
        done = {
            engine: generate(engine, requests, self.tail, pace)
            for engine, pace in (sides if self.step % 2 else reversed(sides))  # so that neither is always the first
        }
        compare(done[self.plain], done[self.speculating], found)
        rewards = loop.rewards(done[self.plain], entries, samples)
        loop.learner.update([loop.pack(self.step, entries, done[self.plain], rewards)])
        self.step += 1
        save_weights(loop.learner.model, loop.weights(self.step))
        file.unlink()
        self.lengths += [
            {"prompt": entry["question"], "step": self.step - 1, "length": len(each.generated.token_ids)}
            for entry, each in zip((entry for entry in entries for _ in range(samples)), done[self.plain], strict=True)
        ]
        return rewards

    def _requests(self, entries: Sequence[Any]) -> list[Request]:
        prompts, tokenizer = self.loop.config.prompts, self.loop.tokenizer
        sampling = Sampling(
            prompts.temperature, 1.0, 0, prompts.max_new_tokens, (int(tokenizer.eos_token_id),), self.step
        )
        return [
            Request(
                trajectory_id("train", number, member),
                np.array(tokenizer.encode(entry["question"]), np.int32),
                sampling,
            )
            for number, entry in enumerate(entries)
            for member in range(prompts.samples_per_prompt)
        ]


def compare(plain: Sequence[Completion], speculating: Sequence[Completion], found: Epoch) -> None:
    """Count in `found` the responses and logprobs that differ."""
    for one, other in zip(plain, speculating, strict=True):
        found.responses += 1
        if not np.array_equal(one.generated.token_ids, other.generated.token_ids):
            found.other_tokens += 1
        else:
            found.other_logprobs += int((one.generated.logprobs != other.generated.logprobs).sum())


def emulated_seconds(
    lengths: Sequence[int], slots: int, tail: int, speculation: SpeculationEmulation | None
) -> Emulated:
    """The time in which a 32B replica generates responses of `lengths` × STRIDE tokens, submitted together."""
    clock = _Clock()
    emulation = EngineEmulation(stride=STRIDE)
    config = emulated_scheduling(slots, DEFAULT_CONTEXT // STRIDE, None, emulation)
    roofline = Roofline(RooflineConfig(), STRIDE, speculation)
    engine = EmulatedEngine(config, roofline, lambda seed, name: lengths[int(name)], clock=clock)
    for number in range(len(lengths)):
        prompt, most = np.full(16, number // 8, np.int32), DEFAULT_CONTEXT // STRIDE
        engine.submit(Request(str(number), prompt, Sampling(1.0, 1.0, 0, most, (0,), 0)))
    left, tail_began = len(lengths), 0.0
    while left:
        clock.now += max(engine.due(), 1e-6)
        left -= len(engine.step())
        if left > tail:
            tail_began = clock.now
    return Emulated(clock.now, clock.now - tail_began)


class _Clock:
    """A clock that the emulation sets, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--questions", type=int, default=0, help="questions of an epoch; 0: fresh ones in every batch"
    )
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--tail", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=60, help="batches of all epochs, with fresh questions")
    arguments.add_argument("--cache", type=Path, default=Path("runs/warm-starts"))
    arguments.add_argument("--lengths", type=Path, help="a JSONL file for question, batch and length of each response")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    config = load_config(EXAMPLE, ["warm_start.measured=64", *options.set])
    prompts = config.experience.global_batch // config.prompts.samples_per_prompt
    fresh = (question.reference for question in numbered_questions(config.prompts))
    repeated = list(itertools.islice(fresh, options.questions))
    with tempfile.TemporaryDirectory() as scratch:
        training = Training(Loop(config, make_start(config, options.cache).folder, Path(scratch)), options.tail)
        each = options.steps // options.epochs * prompts
        epochs = [training.epoch(repeated or list(itertools.islice(fresh, each))) for _ in range(options.epochs)]
    if options.lengths:
        options.lengths.write_text("".join(json.dumps(line) + "\n" for line in training.lengths))
    last = [line["length"] for line in training.lengths][-16 * config.experience.global_batch :]
    batches = [
        last[i : i + config.experience.global_batch] for i in range(0, len(last), config.experience.global_batch)
    ]
    measured = [SpeculationEmulation(each.counts.draft_share, each.counts.acceptance) for each in epochs]
    emulated = [_emulated_gain(batches, options.tail, each) for each in measured]
    if options.json:
        found = [
            asdict(epoch) | {"emulated_32b": dict(zip(("batch", "tail"), gains, strict=True))}
            for epoch, gains in zip(epochs, emulated, strict=True)
        ]
        print(json.dumps(found))
        return
    console = Console(width=150)
    console.print(_table(epochs, emulated, options))
    batch, tail = _emulated_gain(batches, options.tail, SpeculationEmulation())
    console.print(f"32B by the defaults of rollout.emulation.speculation: batch {batch:.2f}, tail {tail:.2f}")
    console.print(f"{describe_machine()}; {len(training.lengths):,} responses")


def _emulated_gain(
    batches: Sequence[Sequence[int]], tail: int, speculation: SpeculationEmulation
) -> tuple[float, float]:
    """How much faster batches and their tails are with `speculation`, on average."""
    sums = []
    for each_speculation in (None, speculation):
        found = [emulated_seconds(lengths, len(lengths), tail, each_speculation) for lengths in batches]
        sums.append((sum(each.seconds for each in found), sum(each.tail_seconds for each in found)))
    return sums[0][0] / sums[1][0], sums[0][1] / sums[1][1]


def _table(epochs: Sequence[Epoch], emulated: Sequence[tuple[float, float]], options: argparse.Namespace) -> Table:
    what = f"{options.questions} questions an epoch" if options.questions else "fresh questions"
    table = Table(title=f"Recipe B, {what}; the tail: at most {options.tail} trajectories")
    columns = ("epoch", "reward", "tail tokens/s, plain", "speculating", "ratio", "all tokens: ratio", "with a draft")
    more = ("accepted", "tokens a draft", "other tokens", "other logprobs", "32B, batch", "32B, tail")
    for column in (*columns, *more):
        table.add_column(column, justify="right")
    for number, (epoch, (batch, tail)) in enumerate(zip(epochs, emulated, strict=True), 1):
        plain, other, counts = epoch.plain, epoch.speculating, epoch.counts
        table.add_row(
            str(number),
            f"{epoch.reward:.2f}",
            f"{plain.tail_rate:,.0f}",
            f"{other.tail_rate:,.0f}",
            f"{other.tail_rate / plain.tail_rate:.2f}",
            f"{other.rate / plain.rate:.2f}",
            f"{counts.draft_share:.2f}",
            f"{counts.acceptance:.3f}",
            f"{counts.accepted / max(1, counts.drafts):.1f} of {counts.drafted / max(1, counts.drafts):.1f}",
            f"{epoch.other_tokens} of {epoch.responses:,}",
            f"{epoch.other_logprobs:,}",
            f"{batch:.2f}",
            f"{tail:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
