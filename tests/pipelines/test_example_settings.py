"""The effective settings of each example, compared with a reviewed golden file.

After a change of an example or default, run `python tests/pipelines/test_example_settings.py` and review the diff.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY)]

import pytest  # noqa: E402

from operators.trainer.algorithms import resolve  # noqa: E402
from pipelines.config import load_config  # noqa: E402

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.toml"))
GOLDEN = Path(__file__).with_name("example_settings.json")


def settings(example: Path) -> dict[str, Any]:
    """The settings of `example` for devices, algorithm, batches and sequence lengths."""
    config = load_config(example, [])
    rollout, trainer, learner = config.rollout, config.trainer, config.trainer.learner
    algorithm = resolve(learner.algorithm)
    return {
        "engine": rollout.engine,
        "rollout": f"{rollout.processes} x {rollout.tensor_parallel} GPUs, {rollout.dtype}",
        "trainer": f"{trainer.ranks} x {trainer.device}, {learner.precision}",
        "algorithm": f"{learner.algorithm.name}, {algorithm.aggregation}, cap {algorithm.correction.cap:g}",
        "rate": f"{learner.learning_rate:g} after {learner.warmup_steps} batches, {learner.schedule}",
        "steps a batch": learner.mini_batches * learner.epochs,
        "batch": f"{config.experience.global_batch} in groups of {config.prompts.samples_per_prompt}",
        "lengths": f"{config.prompts.max_new_tokens} new, context {rollout.context}",
        "micro-batch tokens": learner.micro_batch_tokens,
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_effective_settings_of_example_match_golden_file(example: Path) -> None:
    assert settings(example) == json.loads(GOLDEN.read_text())[example.name]


def test_model_examples_use_a_small_learning_rate() -> None:
    for example in EXAMPLES:
        config = load_config(example, [])
        if str(config.model.path or "").startswith("/models/"):
            assert config.trainer.learner.learning_rate == 1e-6, example


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({each.name: settings(each) for each in EXAMPLES}, indent=1) + "\n")
