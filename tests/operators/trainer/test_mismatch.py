"""Mismatch of rollout and trainer logprobs under the same weights, and its warning above the bound."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_batches import make_batch, save_tiny_model

from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.mismatch import Mismatch, MismatchAlarm, current_versions
from schemas import columns
from schemas.records import PolicyVersion


def test_mismatch_counts_only_fresh_sequences() -> None:
    found = Mismatch(torch.tensor([True, False]))
    behaviour = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    found.add(torch.tensor([-1.0, -1.5, -9.0, -9.0]), behaviour, torch.tensor([0, 0, 1, 1]))
    values = found.means()
    found.add(torch.tensor([-2.0]), torch.tensor([-1.0]), torch.tensor([0]))
    of_both = found.means()
    assert (of_both["mismatch/abs_mean"], of_both["mismatch/abs_max"], of_both["mismatch/share_above_1"]) == (0.5, 1, 0)
    found.add(torch.tensor([-1.0]), torch.tensor([-1.25]), torch.tensor([0]))
    assert found.means()["mismatch/abs_max"] == 1
    assert values["mismatch/abs_mean"] == 0.25
    assert values["mismatch/abs_max"] == 0.5
    assert values["mismatch/kl"] == pytest.approx((2.718281828**0.5 - 1.5) / 2)
    assert [values[f"mismatch/share_above_{nats}"] for nats in ("0.01", "0.1", "1")] == [0.5, 0.5, 0]
    assert Mismatch(torch.tensor([False])).means() == {}


def test_current_versions_are_those_that_the_batch_changes() -> None:
    versions = [PolicyVersion(1, 7), PolicyVersion(2, 7), PolicyVersion(2, 6), PolicyVersion(0, 7)]
    assert current_versions(versions, 7).tolist() == [True, True, False, False]
    assert current_versions([], 7).dtype == torch.bool


def test_mismatch_at_staleness_0_leaves_out_earlier_weights(tmp_path: Path) -> None:
    (row,) = make_batch(number=7)
    older = replace(row, staleness=columns.integers([0] * len(row.trajectory_ids)), batch=8)
    learner = Learner(LearnerConfig(), save_tiny_model(tmp_path))
    assert not [name for name in learner.update([older]) if name.startswith("mismatch/")]


def test_mismatch_above_the_bound_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    alarm = MismatchAlarm(0.01)
    with caplog.at_level(logging.WARNING):
        for kl in (0.001, 0.02, 0.03, 0.01, math.nan):
            alarm.check(metrics := {"mismatch/kl": kl})
            assert metrics["mismatch/above_bound"] == (kl not in (0.001, 0.01))
        alarm.check({})
    assert [record.getMessage().count("Likely causes") for record in caplog.records] == [1, 1]


def test_first_mismatch_above_the_bound_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    MismatchAlarm(0.01).check({"mismatch/kl": 0.02})
    assert "Likely causes" in caplog.text


def test_mismatch_is_of_the_first_optimizer_step(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    found = [
        Learner(LearnerConfig(epochs=epochs, learning_rate=1e-2, warmup_steps=0), folder).update(make_batch())
        for epochs in (1, 3)
    ]
    assert found[0]["mismatch/kl"] == found[1]["mismatch/kl"] > 0
