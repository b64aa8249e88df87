"""The TRL side of benchmarks/end_to_end.py: the same training with its GRPOTrainer, in its own virtual environment.

    make trl-env
    .venv-trl/bin/python -m benchmarks.trl.grpo --model FOLDER --questions FILE --max-new-tokens 48 --out FOLDER

Questions are JSON lines of `prompt`, `task` and `reference`, taken in order. The code that scores
Laminar's responses scores these. Writes `steps.jsonl`, one line per optimizer step, and `result.json`. Under
`torch.distributed.run` every rank scores its share of a batch, and rank N writes to the folder `rank-N`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as trl_version

from benchmarks.scoring import scorer


def main() -> None:
    """Train, and write the results."""
    options = _options()
    torch.set_num_threads(options.threads)
    rank = int(os.environ.get("RANK", 0))
    if rank:  # the other ranks of torch.distributed.run write beside rank 0
        options.out /= f"rank-{rank}"
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.questions.read_text("utf-8").splitlines()]
    if len(rows) < (needed := options.prompts * options.steps):
        sys.exit(f"{options.questions} has {len(rows)} questions, {options.steps} steps take {needed}")
    with (options.out / "steps.jsonl").open("w") as log:
        watch = Watch(log)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=watch.timed("reward", reward_function(options.answer_marker)),
            args=grpo_config(options),
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "row": json.dumps(row)} for row in rows]),
            callbacks=[watch],
        )
        trainer._generate_single_turn = watch.timed("generation", trainer._generate_single_turn)
        trainer.train()
    result = {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "threads": torch.get_num_threads(),
        "versions": {"trl": trl_version, "transformers": transformers.__version__, "torch": torch.__version__},
        "began_at": watch.began_at,
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1))


def grpo_config(options: argparse.Namespace) -> GRPOConfig:
    """TRL's settings: equal to those of Laminar's trainer, and the fastest on CPU where only speed differs."""
    batch = options.prompts * options.samples
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rows = min(options.device_batch, batch // ranks)
    return GRPOConfig(
        output_dir=str(options.out / "trl"),
        # One optimizer update a generation batch.
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // (rows * ranks),
        generation_batch_size=batch,
        num_iterations=1,
        max_steps=options.steps,
        num_generations=options.samples,
        max_completion_length=options.max_new_tokens,
        temperature=options.temperature,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        # The objective.
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=options.clip_low,
        epsilon_high=options.clip_high,
        # The optimizer.
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup_steps,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        weight_decay=0.0,
        max_grad_norm=options.max_gradient_norm,
        # What only costs time.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=options.continuous_batching,
        disable_dropout=True,
        save_strategy="no",
        report_to="none",
        logging_steps=options.steps,
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        seed=options.seed,
    )


def reward_function(answer_marker: str) -> Any:
    """A reward function for TRL that scores like a run of Laminar."""
    score = scorer(answer_marker)

    def reward(
        completions: Sequence[str], completion_ids: Sequence[Sequence[int]], row: Sequence[str], **_: Any
    ) -> Any:
        return [
            score(text, len(ids), question["prompt"], question["task"], question["reference"])
            for text, ids, question in zip(completions, completion_ids, map(json.loads, row), strict=True)
        ]

    return reward


class Watch(TrainerCallback):
    """Writes one line per step: its end, in seconds since the first generation's start, and the seconds of its parts.

    `cpu` is the CPU time of the process so far. `began_at`: the start of the first generation (Unix seconds).
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self.began_at = 0.0
        self._began: float | None = None
        self._parts: dict[str, float] = {}
        self._reward = 0.0
        self._tokens = 0.0

    def timed(self, name: str, function: Any) -> Any:
        """Wrap `function` to count its time as `name`. The first call of any wrapped function starts the clock."""

        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            if self._began is None:
                self._began, self.began_at = started, time.time()
            given = function(*arguments, **named)
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - started
            if name == "reward":
                self._reward = sum(given) / len(given)
                self._tokens = sum(map(len, named["completion_ids"])) / len(given)
            return given

        call.__name__ = name
        return call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the line of a finished optimizer step."""
        assert self._began is not None
        line = {
            "step": state.global_step,
            "ended": time.perf_counter() - self._began,
            "cpu": time.process_time(),
            "reward": self._reward,
            "response_length": self._tokens,
            **{f"time/{name}": seconds for name, seconds in self._parts.items()},
        }
        self._parts = {}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


def _options() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--questions", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--prompts", type=int, default=16, help="prompts per step")
    arguments.add_argument("--samples", type=int, default=8, help="responses per prompt")
    arguments.add_argument("--max-new-tokens", type=int, required=True)
    arguments.add_argument("--temperature", type=float, default=1.0)
    arguments.add_argument("--answer-marker", default="#")
    arguments.add_argument("--learning-rate", type=float, default=2e-4)
    arguments.add_argument("--warmup-steps", type=int, default=5)
    arguments.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    arguments.add_argument("--clip-low", type=float, default=0.2)
    arguments.add_argument("--clip-high", type=float, default=0.28)
    arguments.add_argument("--max-gradient-norm", type=float, default=1.0)
    arguments.add_argument("--device-batch", type=int, default=128, help="rows of one forward and backward pass")
    arguments.add_argument(
        "--continuous-batching", action="store_true", help="generate by transformers' generate_batch"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--threads", type=int, default=2)
    return arguments.parse_args()


if __name__ == "__main__":
    main()
