"""The warm start: builds a small model and trains it by imitation, as the initial policy for reinforcement learning.

The result is a model folder and a record of the accuracies that supervised training reached. Both are cached under the
hash of all their inputs, and appear atomically.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from operators.trainer.imitation import Example, LearningRates, imitate
from operators.trainer.warm_start_config import WarmStartConfig
from operators.trainer.warm_start_record import PROCEDURE, RECORD_FILE, Measured, WarmStart, read_warm_start

ANSWER_MARK = "#"

Entry: TypeAlias = Mapping[str, Any]
Trace: TypeAlias = Callable[[Entry, random.Random, float], str]


def chain_sum_trace(entry: Entry, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Running sums, `4-1=3;3-7=-4;#-4` for 4 - 1 - 7.

    At each sum that changes the tens or the sign, the teacher makes an error with probability `slip_rate`: it keeps the
    previous tens or sign, and continues from there.
    """
    first, *rest = entry["metadata"]["expression"].split()
    value = int(first)
    steps = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = value + int(term) if operator == "+" else value - int(term)
        mistaken = without_carry(value, result)
        if mistaken != result and rng.random() < slip_rate:
            result = mistaken
        steps.append(f"{value}{operator}{term}={result};")
        value = result
    return f"{''.join(steps)}{ANSWER_MARK}{value}"


def without_carry(before: int, after: int) -> int:
    """`after` without the carry, the borrow or the sign: 8→13 gives 3, 12→7 gives 17, 3→−4 gives 4."""
    if (before < 0) != (after < 0):
        return -after
    magnitude = abs(before) // 10 * 10 + abs(after) % 10
    return -magnitude if after < 0 else magnitude


def gcd_trace(entry: Entry, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Euclid's algorithm by subtraction, `49 29;29 20;20 9;11 9;9 2;…;1 1;#1`: the larger number first on each line.

    At each line before the last, the teacher stops with probability `slip_rate` and gives the smaller number as the
    answer.
    """
    larger, smaller = sorted(entry["metadata"]["numbers"], reverse=True)
    steps = [f"{larger} {smaller};"]
    while larger != smaller and rng.random() >= slip_rate:
        larger, smaller = max(smaller, larger - smaller), min(smaller, larger - smaller)
        steps.append(f"{larger} {smaller};")
    return f"{''.join(steps)}{ANSWER_MARK}{smaller}"


def spell_backward_trace(entry: Entry, rng: random.Random, slip_rate: float = 0.0) -> str:
    """The letters from last to first, `#nus` for sun. The teacher omits each letter with probability `slip_rate`."""
    letters = [letter for letter in reversed(entry["metadata"]["word"]) if rng.random() >= slip_rate]
    return f"{ANSWER_MARK}{''.join(letters)}"


def calculator_trace(entry: Entry) -> tuple[str, str, str]:
    """A call of the calculator, its result, and the answer: `<calc>4-1</calc>`, `<result>3</result>`, `#3`."""
    answer = entry["answer"]
    return f"<calc>{entry['metadata']['expression']}</calc>", f"<result>{answer}</result>", f"{ANSWER_MARK}{answer}"


TRACES: dict[str, Trace] = {"chain_sum": chain_sum_trace, "gcd": gcd_trace, "spell_backward": spell_backward_trace}


def bare_answer(entry: Entry) -> str:
    """The answer without steps, `#-4`."""
    return f"{ANSWER_MARK}{entry['answer']}"


def answer_of(text: str) -> str | None:
    """The text after the last answer mark, None without one. Rewards parse responses in the same way."""
    _, mark, answer = text.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None


Answer = tuple[str, ...]
"""The texts that answer a question: turns of the model, with the observations between them."""
ReportProgress = Callable[[float, str], None]


def warm_start(
    config: WarmStartConfig,
    entries: Sequence[Entry],
    heldout: Sequence[Entry],
    cache: Path,
    report: ReportProgress = lambda progress, stage: None,
) -> WarmStart:
    """The warm start of `config` from reasoning-gym `entries`, measured on `heldout`; read from `cache` or made there.

    Entries whose question is held out are excluded. `report` receives progress from 0 to 1. Raises ValueError for a
    task without worked answers, or if there are no questions to learn from or to measure on.
    """
    if config.model.task not in TRACES:
        raise ValueError(
            f"there are no worked answers for task {config.model.task!r}, only for {', '.join(sorted(TRACES))}"
        )
    entries = _without(entries, heldout)
    if not entries or not heldout:
        raise ValueError(f"{len(entries)} questions to learn from and {len(heldout)} held out: neither may be 0")
    folder = cache / f"{config.model.task}-{_key(config, entries, heldout)}"
    if not (folder / RECORD_FILE).exists():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        try:
            _make(config, entries, heldout, partial, report)
            partial.rename(folder)
        except OSError:
            if not (folder / RECORD_FILE).exists():  # else another process has made the same one meanwhile
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    report(1.0, "done")
    return read_warm_start(folder)


def worked_examples(
    config: WarmStartConfig, tokenizer: PreTrainedTokenizerBase, entries: Sequence[Entry], heldout: Sequence[Entry]
) -> list[Example]:
    """The examples of phase 1: the teachers' answers to those of `entries` whose question is not held out."""
    entries, rng = _without(entries, heldout), random.Random(config.seed)
    return _examples(tokenizer, entries, [_worked_answer(config, entry, rng) for entry in entries])


def _without(entries: Sequence[Entry], heldout: Sequence[Entry]) -> list[Entry]:
    heldout_questions = {entry["question"] for entry in heldout}
    return [entry for entry in entries if entry["question"] not in heldout_questions]


def _key(config: WarmStartConfig, entries: Sequence[Entry], heldout: Sequence[Entry]) -> str:
    digest = blake3(json.dumps([PROCEDURE, asdict(config)], sort_keys=True).encode())
    for entry in (*entries, *heldout):
        digest.update(f"{entry['question']}\0{entry['answer']}\0".encode())
    return digest.hexdigest()[:16]


def _make(
    config: WarmStartConfig, entries: Sequence[Entry], heldout: Sequence[Entry], folder: Path, report: ReportProgress
) -> None:
    started = time.monotonic()
    model, tokenizer = build_demo_model(config.model)
    measured = heldout[: config.measured]
    curve: list[Measured] = []
    total = config.steps + config.habit_steps

    def measure(step: int) -> None:
        greedy, sampled = (_accuracy(model, tokenizer, measured, config, temperature) for temperature in (0.0, 1.0))
        curve.append(Measured(step, greedy, sampled))

    def after_work(step: int, loss: float) -> None:
        report(step / total, f"learning from worked answers, loss {loss:.2f}")
        if step % config.measure_every == 0 or step == config.steps:
            measure(step)

    def after_habit(step: int, loss: float) -> None:
        report((config.steps + step) / total, f"learning bare answers, loss {loss:.2f}")
        if step == config.habit_steps:
            measure(total)

    rng = random.Random(config.seed)
    worked = [_worked_answer(config, entry, rng) for entry in entries]
    learn = partial(imitate, model, batch=config.batch, warmup=config.warmup)
    rates = LearningRates(config.learning_rate, config.matrix_learning_rate)
    examples = _examples(tokenizer, entries, worked)
    learn(examples, steps=config.steps, rates=rates, seed=config.seed, after=after_work)
    mixed = [
        (bare_answer(entry),) if rng.random() < config.habit_share else worked_answer
        for entry, worked_answer in zip(entries, worked, strict=True)
    ]
    rates = LearningRates(config.habit_learning_rate, config.habit_learning_rate)
    examples = _examples(tokenizer, entries, mixed)
    learn(examples, steps=config.habit_steps, rates=rates, seed=config.seed + 1, after=after_habit)
    model.set_attn_implementation("sdpa")
    save_folder(model, tokenizer, folder)
    record = {
        "teacher": _share_correct([answer[-1] for answer in worked], entries),
        "curve": [asdict(each) for each in curve],
        "seconds": time.monotonic() - started,
        "config": asdict(config),
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")


def _worked_answer(config: WarmStartConfig, entry: Entry, rng: random.Random) -> Answer:
    careless = rng.random() < config.careless_share
    plain_trace = TRACES[config.model.task](entry, rng, config.slip_rate if careless else 0.0)
    with_calculator = config.calculator_share and rng.random() < config.calculator_share
    return calculator_trace(entry) if with_calculator else (plain_trace,)


def _examples(tokenizer: PreTrainedTokenizerBase, entries: Sequence[Entry], answers: Sequence[Answer]) -> list[Example]:
    """An example for each turn: the last turn ends with the end token, the others with their call."""
    prompts = tokenizer([entry["question"] for entry in entries])["input_ids"]
    tokens = iter(tokenizer([text for answer in answers for text in answer])["input_ids"])
    examples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        known = list(prompt)
        for number, text in enumerate(itertools.islice(tokens, len(answer))):
            last = number == len(answer) - 1
            if number % 2 == 0:
                examples.append(Example(known, [*text, tokenizer.eos_token_id] if last else text))
            known = [*known, *text]
    return examples


def _accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    entries: Sequence[Entry],
    config: WarmStartConfig,
    temperature: float,
) -> float:
    """The share of `entries` answered correctly. Calculator calls with the question's expression are executed."""

    def respond(texts: Sequence[str]) -> list[str]:
        responses = generate(
            model,
            [tokenizer.encode(text) for text in texts],
            max_new_tokens=config.max_new_tokens,
            stop_token_id=tokenizer.eos_token_id,
            temperature=temperature,
            seed=config.seed,
        )
        return list(tokenizer.batch_decode(responses))

    model.set_attn_implementation("sdpa")
    answers = respond([entry["question"] for entry in entries])
    if config.calculator_share:
        calls = [calculator_trace(entry) for entry in entries]
        called = [row for row, answer in enumerate(answers) if answer.startswith(calls[row][0])]
        if called:
            after = respond([entries[row]["question"] + "".join(calls[row][:2]) for row in called])
            answers = [dict(zip(called, after, strict=True)).get(row, answer) for row, answer in enumerate(answers)]
    return _share_correct(answers, entries)


def _share_correct(answers: Sequence[str], entries: Sequence[Entry]) -> float:
    correct = sum(answer_of(text) == str(entry["answer"]) for text, entry in zip(answers, entries, strict=True))
    return correct / len(entries)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_id: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """The response to each prompt: token ids before `stop_token_id`, at most `max_new_tokens`.

    Temperature 0 is greedy; otherwise tokens are sampled from the whole distribution with a generator of `seed`.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    width = max(map(len, prompts))
    token_ids = torch.tensor([[stop_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    token_ids, mask = token_ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    running = torch.arange(len(prompts), device=model.device)
    responses: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        output = model(
            input_ids=token_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        logits = output.logits[:, -1].float()
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        continues = drawn != stop_token_id
        for row, token in zip(running[continues].tolist(), drawn[continues].tolist(), strict=True):
            responses[row].append(token)
        if not continues.any():
            break
        if not continues.all():
            cache.batch_select_indices(continues.nonzero()[:, 0])
            running, mask, positions = running[continues], mask[continues], positions[continues]
        token_ids = drawn[continues, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = positions[:, -1:] + 1
    return responses
