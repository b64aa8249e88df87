"""benchmarks/schedules.py: predictions are within 10 % of the runs that were measured."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.schedules import MEASURED, predicted

DEFAULTS = Namespace(train_us=25.0, time_scale=20.0, steps=6, seeds=[0])


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name == "laminar" else pytest.mark.soak) for name in MEASURED]
)
def test_prediction_is_within_10_percent_of_the_measured(schedule: str) -> None:
    assert predicted(schedule, DEFAULTS).trained_tokens_per_s == pytest.approx(MEASURED[schedule], rel=0.1)
