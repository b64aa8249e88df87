"""The control of benchmarks/end_to_end.py: the same training in a plain synchronous loop, without Kafka and Beam.

    OMP_NUM_THREADS=1 python -m benchmarks.control CONFIG --model FOLDER --out FOLDER --threads 1

Our engine, learner and verifier, one after the other: generate a batch, score it, update, load the new weights. The
configuration is that of the run. Writes `steps.jsonl`, one line per optimizer step, and `result.json`. A run that takes
longer than this loop on one core gains nothing from asynchrony.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.recipe import Loop, numbered_questions
from benchmarks.scoring import Scorer, scorer
from infra.models.weights import save_weights
from operators.prompts.question import Question
from pipelines.config import Config, load_config

PARTS = ("questions", "generation", "verification", "training", "weights")
"""What a step does, in the order in which it is measured: `weights` saves the new weights and loads them."""
ENGINE = "cpu/engine"
"""CPU seconds in engine steps, a part of `cpu/generation`, counted as in a run."""


def main() -> None:
    """Train, and write the results."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--threads", type=int, default=1, help="also the number of cores")
    options = arguments.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    train(load_config(options.config), options.model, options.out)


def train(config: Config, model: Path, out: Path) -> None:
    """Train `model` to the goal of `config`; write the results to the folder `out`."""
    with tempfile.TemporaryDirectory() as scratch, (out / "steps.jsonl").open("w") as log:
        loop = Loop(config, model, Path(scratch))
        save_weights(loop.learner.model, loop.weights(0))
        loop.load(0)
        questions, score = numbered_questions(config.prompts), scorer(config.score.answer_marker)
        began_at, began = time.time(), time.perf_counter()  # of the first generation, as for the others
        for number, line in enumerate(steps(loop, questions, score), start=1):
            log.write(json.dumps({"step": number, "ended": time.perf_counter() - began} | line) + "\n")
            log.flush()
    result = {"threads": torch.get_num_threads(), "versions": {"torch": torch.__version__}, "began_at": began_at}
    (out / "result.json").write_text(json.dumps(result))


def steps(loop: Loop, questions: Iterator[Question], score: Scorer) -> Iterator[dict[str, float]]:
    """Train with `loop`, which has loaded its first weights; of every step the mean reward, the tokens generated, the
    engine's steps, and the CPU seconds by part and in the engine."""
    config = loop.config
    samples = config.prompts.samples_per_prompt
    for step in range(config.trainer.optimizer_steps):
        clock = _PartClock()
        asked = [next(questions) for _ in range(config.experience.global_batch // samples)]
        clock.end("questions")
        entries = [question.reference for question in asked]
        steps_before, seconds_before = loop.engine_steps, loop.engine.status().model_seconds
        done = loop.answers(entries, samples, config.prompts.temperature, config.run.seed * 1_000_000 + step)
        in_engine = loop.engine.status().model_seconds - seconds_before
        clock.end("generation")
        texts = loop.tokenizer.batch_decode([each.generated.token_ids for each in done], skip_special_tokens=True)
        each_asked = [question for question in asked for _ in range(samples)]
        rewards = [
            score(text, len(each.generated.token_ids), question.text, question.task, question.reference)
            for text, each, question in zip(texts, done, each_asked, strict=True)
        ]
        batch = loop.pack(step, entries, done, rewards)
        clock.end("verification")
        loop.learner.update([batch])
        clock.end("training")
        save_weights(loop.learner.model, loop.weights(step + 1))
        loop.load(step + 1)
        loop.weights(step).unlink()
        clock.end("weights")
        yield {
            "reward": sum(rewards) / len(rewards),
            "tokens": sum(len(each.generated.token_ids) for each in done),
            "engine_steps": loop.engine_steps - steps_before,
            ENGINE: in_engine,
            **{f"cpu/{part}": seconds for part, seconds in clock.seconds.items()},
        }


class _PartClock:
    """CPU seconds of the process, by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def end(self, part: str) -> None:
        """End `part`, which began when the last one ended."""
        now = time.process_time()
        self.seconds[part], self._last = now - self._last, now


def read_steps(file: Path) -> Sequence[dict[str, Any]]:
    """The lines of a steps.jsonl."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
