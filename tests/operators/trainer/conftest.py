"""The trainer as a role on a log in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trainer_on_a_log import Trainer

# The fixtures import the trainer: while pytest loads this file, warnings of libraries at their import are errors.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trainer_batches import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def trainer(
    request: pytest.FixtureRequest, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Trainer]:
    """A trainer of six batches with a checkpoint every two (or the fixture's parameter); not started."""
    from trainer_on_a_log import Producer, Trainer

    from operators.trainer import publishing, version_publisher
    from operators.trainer.rank_services import RankServices

    made = Trainer(tmp_path, model, checkpoint_every=getattr(request, "param", 2))
    monkeypatch.setattr(RankServices, "producer", lambda self, client: Producer(client))
    monkeypatch.setattr(RankServices, "role_notes", lambda self, client, run: made.notes)
    monkeypatch.setattr(publishing, "ManifestLog", lambda producer, run: made.announce)
    monkeypatch.setattr(version_publisher, "RETRY_S", 0.0)
    yield made
    made.shard.crash()
