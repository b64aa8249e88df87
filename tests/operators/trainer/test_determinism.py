"""Deterministic kernels on a GPU: torch's modes, set and restored, without one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_batches import make_batch, save_tiny_model

from operators.trainer import learner as learner_module
from operators.trainer.config import LearnerConfig
from operators.trainer.determinism import kernels
from operators.trainer.learner import Learner

UNINITIALIZED: Any = torch.utils.deterministic


@pytest.mark.parametrize(
    ("device", "wanted", "expected"), [("cuda:1", True, 2), ("cuda:1", False, 0), ("cpu", True, 0)]
)
def test_kernels_are_deterministic_on_a_gpu(device: str, wanted: bool, expected: int) -> None:
    filled = UNINITIALIZED.fill_uninitialized_memory
    with kernels(torch.device(device), deterministic=wanted):
        assert torch.get_deterministic_debug_mode() == expected  # 1 would leave attention as it is
        assert UNINITIALIZED.fill_uninitialized_memory == (filled and not expected)
    assert (torch.get_deterministic_debug_mode(), UNINITIALIZED.fill_uninitialized_memory) == (0, filled)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_operation_that_is_not_deterministic_names_the_setting() -> None:
    refused = r"^put_ does not have a deterministic implementation.* Set trainer\.learner\.deterministic = false"
    with pytest.raises(RuntimeError, match=f"(?s){refused}"), kernels(torch.device("cuda"), deterministic=True):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    assert torch.get_deterministic_debug_mode() == 0


def test_update_requests_the_kernels_of_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model")
    asked: list[tuple[torch.device, bool]] = []

    def record(device: torch.device, *, deterministic: bool) -> AbstractContextManager[None]:
        asked.append((device, deterministic))
        return nullcontext()

    monkeypatch.setattr(learner_module, "kernels", record)
    for deterministic in (True, False):
        Learner(LearnerConfig(deterministic=deterministic), folder).update(make_batch())
    assert asked == [(torch.device("cpu"), True), (torch.device("cpu"), False)]
