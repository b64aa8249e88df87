"""Each rank uses a GPU of its own machine."""

from __future__ import annotations

import pytest

from operators.trainer import training_config
from operators.trainer.training_config import TrainingConfig


@pytest.mark.parametrize(
    ("device", "ranks", "rank", "visible", "expected"),
    [
        ("cpu", 2, 1, 8, "cpu"),
        ("cuda", 1, 0, 8, "cuda"),
        ("cuda:5", 1, 0, 8, "cuda:5"),
        ("cuda", 4, 3, 8, "cuda:3"),
        ("cuda", 16, 8, 8, "cuda:0"),
        ("cuda", 16, 11, 8, "cuda:3"),
        ("cuda", 2, 1, 0, "cuda:0"),
    ],
)
def test_rank_uses_a_gpu_of_its_machine(
    device: str, ranks: int, rank: int, visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_config, "visible_gpus", lambda: tuple(map(str, range(visible))))
    assert TrainingConfig(device=device, ranks=ranks).device_of(rank) == expected


@pytest.mark.parametrize(
    ("ranks", "gpus", "rank", "expected"), [(1, (6,), 0, "cuda:6"), (8, (0, 1, 4, 5), 6, "cuda:4")]
)
def test_rank_uses_one_of_the_gpus_named_for_the_trainer(
    ranks: int, gpus: tuple[int, ...], rank: int, expected: str
) -> None:
    assert TrainingConfig(device="cuda", ranks=ranks, gpus=gpus).device_of(rank) == expected
