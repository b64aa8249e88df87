"""The trainer's configuration: invalid fields are named, and torch is not imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from operators.trainer.config import AlgorithmConfig, CriticConfig, LearnerConfig, ParameterGroup, RateSchedule
from operators.trainer.training_config import TrainingConfig

WRONG: list[tuple[type, str, Any]] = [
    (AlgorithmConfig, "name", "ppo2"),
    (AlgorithmConfig, "aggregation", "mean"),
    (AlgorithmConfig, "proximal", "old"),
    (AlgorithmConfig, "correction", "drop"),
    (AlgorithmConfig, "correction_level", "batch"),
    (AlgorithmConfig, "clip_low", 1.5),
    (AlgorithmConfig, "clip_high", -0.1),
    (AlgorithmConfig, "dual_clip", 1.0),
    (AlgorithmConfig, "correction_cap", 0.0),
    (AlgorithmConfig, "correction_low", float("nan")),
    (AlgorithmConfig, "discount", 0.0),
    (AlgorithmConfig, "max_response_tokens", 0),
    (AlgorithmConfig, "kl_coefficient", -1.0),
    (AlgorithmConfig, "std_epsilon", float("inf")),
    (LearnerConfig, "name", "megatron"),
    (LearnerConfig, "name", ":Own"),
    (LearnerConfig, "learning_rate", -1e-4),
    (LearnerConfig, "final_learning_rate", 1.0),
    (LearnerConfig, "warmup_steps", -1),
    (LearnerConfig, "schedule", "polynomial"),
    (LearnerConfig, "precision", "float16"),
    (LearnerConfig, "mini_batches", 0),
    (LearnerConfig, "epochs", 0),
    (AlgorithmConfig, "gae_lambda", 1.1),
    (AlgorithmConfig, "kl_kind", "k4"),
    (AlgorithmConfig, "kl_in", "advantage"),
    (ParameterGroup, "match", "("),
    (LearnerConfig, "betas", (0.9, 1.0)),
    (LearnerConfig, "epsilon", 0.0),
    (LearnerConfig, "weight_decay", -0.1),
    (LearnerConfig, "max_gradient_norm", 0.0),
    (LearnerConfig, "micro_batch_tokens", 0),
    (LearnerConfig, "logits_chunk_tokens", 0),
    (LearnerConfig, "reference_dtype", "float64"),
    (TrainingConfig, "batch_shares", -1),
    (TrainingConfig, "shard_ranks", 2),
    (TrainingConfig, "shard_ranks", -1),
    (TrainingConfig, "collective_timeout_s", 0.0),
]


@pytest.mark.parametrize(("kind", "field", "value"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)))
def test_config_names_an_invalid_field(kind: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must"):
        kind(**({"match": ""} if kind is ParameterGroup else {}) | {field: value})


def test_config_rejects_share_device_of_several_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"^learner\.share_device needs ranks = 1, not 2: set learner\.offload instead"
    ):
        TrainingConfig(learner=LearnerConfig(share_device=True), ranks=2)


def test_config_rejects_fewer_shares_than_ranks() -> None:
    with pytest.raises(ValueError, match=r"^batch_shares must be 0 or at least ranks \(4\), not 3"):
        TrainingConfig(ranks=4, batch_shares=3)


@pytest.mark.parametrize(
    ("ranks", "shares", "shards", "expected"),
    [
        (1, 0, 2, [(0, 1)]),
        (2, 0, 1, [(0,), (1,)]),
        (2, 4, 1, [(0, 2), (1, 3)]),
        (3, 4, 2, [(0, 1, 6, 7), (2, 3), (4, 5)]),
        (1, 3, 1, [(0, 1, 2)]),
    ],
)
def test_each_partition_has_one_rank(ranks: int, shares: int, shards: int, expected: list[tuple[int, ...]]) -> None:
    config = TrainingConfig(ranks=ranks, batch_shares=shares)
    assert [config.partitions_of(rank, shards) for rank in range(ranks)] == expected
    assert config.shares == (shares or ranks)


@pytest.mark.parametrize("field", ["learning_rate", "value_clip"])
def test_config_rejects_an_invalid_critic(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be positive, not 0"):
        CriticConfig(**{field: 0.0})


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_config_rejects_a_schedule_without_end(schedule: RateSchedule) -> None:
    with pytest.raises(ValueError, match="total_steps"):
        LearnerConfig(schedule=schedule)
    with pytest.raises(ValueError, match="total_steps"):
        LearnerConfig(schedule="cosine", warmup_steps=5, total_steps=5)
    assert LearnerConfig(schedule="cosine", warmup_steps=5, total_steps=6).total_steps == 6


def test_config_does_not_import_torch() -> None:
    code = "import sys, operators.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
