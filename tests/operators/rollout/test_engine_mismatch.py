"""Each engine in each dtype stays within its documented mismatch with the trainer, and beyond the bound it is reported.

The bounds are those of the table in docs/training.md.
"""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from engine_kinds import KINDS, NAMED, maker
from sampled_batches import sampled_batch
from tiny_models import VOCABULARY, tiny_model
from vllm_engines import FAMILY, model_folder

from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.config import LearnerConfig, Precision
from operators.trainer.learner import Learner

TRAINING = Path(__file__).parents[3] / "docs" / "training.md"
ROW = r"^\| (transformers|vllm) \| (\w+) \| (\w+) \| ([\de.-]+) \| ([\de.-]+) \|"
BOUNDS = {row[:3]: (float(row[3]), float(row[4])) for row in re.findall(ROW, TRAINING.read_text("utf-8"), re.MULTILINE)}
"""Of `mismatch/kl` and `mismatch/abs_mean`, in nats, by engine, rollout.dtype and trainer.learner.precision."""
ROWS = {"transformers": "transformers", "vllm": "vllm", "vllm_sampler": "vllm"} | (
    {NAMED: "vllm"} if NAMED in KINDS else {}
)
"""The engine of whose rows the bounds are, by kind."""
PAIRS: list[tuple[str, Precision]] = list(itertools.product(("float32", "bfloat16", "float16"), get_args(Precision)))


def test_mismatch_is_documented_for_every_engine_and_dtype() -> None:
    assert BOUNDS.keys() == {(row, *pair) for row in ROWS.values() for pair in PAIRS}
    for bound, _ in BOUNDS.values():
        assert bound <= LearnerConfig().mismatch_bound


@pytest.mark.parametrize(("dtype", "precision"), PAIRS)
@pytest.mark.parametrize("kind", ROWS)
def test_mismatch_stays_within_its_bound(kind: str, dtype: str, precision: Precision) -> None:
    made = maker(kind)(FAMILY, dtype=dtype)
    found = mismatch(sampled_batch(made, (0.8, 1.0, 1.2), vocabulary=VOCABULARY, new_tokens=30), precision)
    kl, mean = BOUNDS[ROWS[kind], dtype, precision]
    assert found["mismatch/kl"] <= kl, found
    assert found["mismatch/abs_mean"] <= mean, found
    assert found["mismatch/abs_max"] > 0


def test_padded_vocabulary_is_sampled_trained_and_decoded(tmp_path: Path) -> None:
    """Ids beyond the tokenizer's can be sampled: engine and trainer give them the same logprobs; they have no text."""
    torch.manual_seed(0)
    model, tokenizer = build_demo_model(DemoModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48))
    model.resize_token_embeddings(len(tokenizer) + 64, mean_resizing=False)
    model.save_pretrained(tmp_path)
    batch = sampled_batch(TransformersEngine(model, slots=8), (1.0, 1.3), vocabulary=len(tokenizer), new_tokens=30)
    ids = [token for row in batch for token in row.token_ids.to_pylist()]
    beyond = [token for token in ids if token >= len(tokenizer)]
    assert beyond
    assert Learner(LearnerConfig(), tmp_path).update(batch)["mismatch/abs_max"] <= 1e-4
    assert tokenizer.decode(beyond) == ""
    assert tokenizer.decode(ids) == tokenizer.decode([token for token in ids if token < len(tokenizer)])


def test_mismatch_of_weights_of_another_version_raises_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(FAMILY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with caplog.at_level(logging.WARNING):
        found = mismatch(sampled_batch(TransformersEngine(model, slots=8), (1.0,), vocabulary=VOCABULARY), "float32")
    assert found["mismatch/kl"] > LearnerConfig().mismatch_bound
    assert "weights of another version" in caplog.text


def mismatch(batch: list[Any], precision: Precision) -> dict[str, float]:
    """What the trainer logs for `batch`, sampled with the weights that it has."""
    return Learner(LearnerConfig(precision=precision), model_folder(FAMILY)).update(batch)
