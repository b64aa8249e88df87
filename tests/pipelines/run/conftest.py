"""What tests of a run's start share."""

from __future__ import annotations

import pytest


@pytest.fixture
def renders_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial renders all rows of a short table, however slow the machine is."""
    monkeypatch.setattr("pipelines.run.trial.SAMPLING_S", 60.0)
