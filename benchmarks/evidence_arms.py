"""The arms of benchmarks/evidence.py: reinforcement learning, its control, and what else the same CPU time buys.

Every arm begins with the same warm start and measures its own CPU seconds, evaluation excluded. The curriculum of an
arm follows the rule of the configured sampler, as in a run.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedModel

from benchmarks.recipe import Loop
from benchmarks.results import Result
from benchmarks.scoring import scorer
from infra.models.checkpoint_folder import load_model
from infra.models.demo import build_demo_model
from infra.models.weights import save_weights
from operators.experience.batch_context import BatchContext
from operators.experience.curriculum import Success, without_oldest
from operators.prompts.question import Question
from operators.prompts.sources import open_levels
from operators.rollout.engine import Completion
from operators.trainer.imitation import Example, LearningRates, imitate
from operators.trainer.warm_start import worked_examples
from pipelines.config import Config
from pipelines.run.warm_start import warm_start_questions

FINE_TUNING_RATES = LearningRates(1e-3, 1e-3)
ROUNDS = 15
"""Rounds of iterated rejection sampling."""
REPORT_EVERY = 25
"""Optimizer steps between two lines of progress."""
TRIAL_STEPS = 8
"""Updates that are timed on a copy to predict how many a budget allows."""


class Levels:
    """The questions of the present level; the configured sampler decides when it changes."""

    def __init__(self, config: Config) -> None:
        self._sources = open_levels(config.prompts)
        self._sampler = config.experience.make_sampler()
        self._success = Success()
        self._drawn = 0
        self.level = 0

    def draw(self, count: int) -> list[Question]:
        """The next `count` questions of the present level."""
        first, self._drawn = self._drawn, self._drawn + count
        return [self._sources[self.level][number] for number in range(first, self._drawn)]

    def draw_all(self, count: int) -> list[Question]:
        """The next `count` questions, of every level in turn."""
        first, self._drawn = self._drawn, self._drawn + count
        return [self._sources[number % len(self._sources)][number] for number in range(first, self._drawn)]

    def count(self, correct: Sequence[bool]) -> None:
        """Count answers to questions of the present level, and change it if the sampler requests another."""
        counted = Success(self._success.right + sum(correct), self._success.answered + len(correct))
        self._success = without_oldest({"": counted}, self._sampler.success_window)[""]
        state = BatchContext(
            batch=0, wanted=0, shares=1, seed=0, newest=None, now=0.0, held=0, success={"": self._success}
        )
        level = min(max(self.level + self._sampler.level_request(state), 0), len(self._sources) - 1)
        if level != self.level:
            self.level, self._success = level, Success()


@dataclass
class Answers:
    """Sampled answers to `questions`, `samples` each, in order."""

    questions: Sequence[Question]
    completions: Sequence[Completion]
    rewards: Sequence[float]
    correct: Sequence[bool]

    def examples(self, loop: Loop) -> dict[tuple[str, tuple[int, ...]], Example]:
        """The distinct correct ones, to be imitated."""
        samples = len(self.completions) // len(self.questions)
        found = {}
        for row, (completion, correct) in enumerate(zip(self.completions, self.correct, strict=True)):
            if correct:
                text, tokens = self.questions[row // samples].text, completion.generated.token_ids.tolist()
                found[text, tuple(tokens)] = Example(loop.tokenizer.encode(text), tokens)
        return found


@dataclass
class CpuClock:
    """CPU seconds of this process since the clock was made."""

    _began: float = field(default_factory=time.process_time)

    @property
    def used(self) -> float:
        return time.process_time() - self._began


def sample(loop: Loop, questions: Sequence[Question], seed: int) -> Answers:
    """Answers of the loaded weights, scored as in a run; an answer is correct if its reward is 1."""
    config = loop.config
    samples = config.prompts.samples_per_prompt
    entries = [question.reference for question in questions]
    done = loop.answers(entries, samples, config.prompts.temperature, seed)
    texts = loop.tokenizer.batch_decode([each.generated.token_ids for each in done], skip_special_tokens=True)
    verifier = config.score.rewards[0]
    score = scorer(config.score.answer_marker, verifier.name, verifier.options)
    rewards = [
        score(text, len(each.generated.token_ids), question.text, question.task, question.reference)
        for text, each, question in zip(texts, done, (q for q in questions for _ in range(samples)), strict=True)
    ]
    return Answers(questions, done, rewards, [reward >= 1 for reward in rewards])


def pass_at(successes: Sequence[int], samples: int, k: int) -> float:
    """pass@k: the mean probability that k of `samples` answers to a question hold a correct one (arXiv 2107.03374)."""
    missed = [math.comb(samples - right, k) / math.comb(samples, k) for right in successes]
    return 1 - sum(missed) / len(missed)


def warm_start_arm(loop: Loop, questions: int, samples: int) -> Result:
    """The accuracy of the warm start, and pass@k over `samples` answers to each of `questions` held-out ones."""
    save_weights(loop.learner.model, loop.weights(0))
    result = _accuracies(loop, 0, 0.0)
    asked = loop.heldout[:questions]
    right = loop.rewards(loop.answers(asked, samples, loop.config.prompts.temperature, 1), asked, samples)
    successes = [int(sum(right[row : row + samples])) for row in range(0, len(right), samples)]
    powers = [k for k in (1, 8, 64) if k <= samples]
    return result | {"pass": {str(k): pass_at(successes, samples, k) for k in powers}}


def reinforcement_arm(loop: Loop, levels: Sequence[int] | None = None) -> Result:
    """All optimizer steps of the configuration, with its curriculum.

    The control has the `levels` of another arm, step by step, and the rewards of each batch are shuffled.
    """
    config, curriculum, clock = loop.config, Levels(loop.config), CpuClock()
    save_weights(loop.learner.model, loop.weights(0))
    visited, rewards, correct = [], [], []
    for step in range(config.trainer.optimizer_steps):
        if levels is not None:
            curriculum.level = levels[step]
        visited.append(curriculum.level)
        loop.load(step)
        questions = curriculum.draw(config.experience.global_batch // config.prompts.samples_per_prompt)
        answers = sample(loop, questions, config.run.seed * 1_000_000 + step)
        correct.append(sum(answers.correct) / len(answers.correct))
        trained = list(answers.rewards)
        if levels is None:
            curriculum.count(answers.correct)
        else:
            random.Random(step).shuffle(trained)
        batch = loop.pack(step, [question.reference for question in questions], answers.completions, trained)
        rewards.append(loop.learner.update([batch])["reward/mean"])
        save_weights(loop.learner.model, loop.weights(step + 1))
        loop.weights(step).unlink()
        if (step + 1) % REPORT_EVERY == 0:
            reward, right = (sum(each[-REPORT_EVERY:]) / REPORT_EVERY for each in (rewards, correct))
            sys.stderr.write(
                f"  {step + 1} steps: reward {reward:.3f}, correct {right:.3f}, level {curriculum.level}\n"
            )
    used = clock.used
    return _accuracies(loop, len(visited), used) | {"levels": visited, "rewards": rewards}


def supervised_arm(loop: Loop, seconds: float) -> Result:
    """The warm start, made longer by `seconds` of CPU: the same teacher, schedule and first level.

    Its accuracies are those of its best checkpoint of four, by greedy accuracy on the held-out questions.
    """
    settings = loop.config.warm_start
    assert settings is not None
    model, tokenizer = build_demo_model(settings.model)
    entries, heldout = warm_start_questions(loop.config)
    examples = worked_examples(settings, tokenizer, entries, heldout)
    train = partial(
        imitate,
        examples=examples,
        batch=settings.batch,
        rates=LearningRates(settings.learning_rate, settings.matrix_learning_rate),
        warmup=settings.warmup,
        seed=settings.seed,
    )
    steps = settings.steps + int(seconds / _cost(model, train))
    saved = {max(1, round(steps * part / 4)) for part in (1, 2, 3, 4)}
    clock = CpuClock()
    train(model, steps=steps, after=lambda step, _: save_weights(model, loop.weights(step)) if step in saved else None)
    used = clock.used
    return max((_accuracies(loop, step, used) for step in saved), key=lambda each: each["greedy"]) | {"steps": steps}


def rejection_arm(loop: Loop, seconds: float, rounds: int) -> Result:
    """Rejection-sampling fine-tuning: sample for half of each round, imitate the distinct correct answers in the other.

    One round samples from the warm start, questions of every level. With several rounds the questions follow the
    curriculum, and each round continues with the weights and all correct answers of the rounds before.
    """
    clock, curriculum = CpuClock(), Levels(loop.config)
    model = load_model(loop.folder)
    prompts = loop.config.experience.global_batch // loop.config.prompts.samples_per_prompt
    save_weights(model, loop.weights(0))
    examples: dict[tuple[str, tuple[int, ...]], Example] = {}
    sampled = trial = 0
    visited = []
    for number in range(rounds):
        loop.load(number)
        end = seconds * (number + 0.5) / rounds
        while clock.used - trial < end:
            visited.append(curriculum.level)
            questions = curriculum.draw(prompts) if rounds > 1 else curriculum.draw_all(prompts)
            answers = sample(loop, questions, loop.config.run.seed * 1_000_000 + sampled)
            sampled += 1
            examples |= answers.examples(loop)
            if rounds > 1:
                curriculum.count(answers.correct)
        if examples:
            rows, before = list(examples.values()), clock.used
            train = partial(imitate, examples=rows, batch=64, rates=FINE_TUNING_RATES, warmup=2, seed=number)
            cost = _cost(model, train)
            trial += clock.used - before
            left = seconds * (number + 1) / rounds - (clock.used - trial)
            train(model, steps=max(1, int(left / cost)))
        save_weights(model, loop.weights(number + 1))
    used = clock.used - trial
    return _accuracies(loop, rounds, used) | {"levels": visited, "examples": len(examples)}


def _cost(model: PreTrainedModel, train: Callable[..., None]) -> float:
    """CPU seconds of an update of `train`, measured on a copy of `model`."""
    clock = CpuClock()
    train(copy.deepcopy(model), steps=TRIAL_STEPS)
    return clock.used / TRIAL_STEPS


def _accuracies(loop: Loop, update: int, cpu: float) -> Result:
    return {"greedy": loop.accuracy(update, 0.0), "sampled": loop.accuracy(update, 1.0), "cpu": cpu}
