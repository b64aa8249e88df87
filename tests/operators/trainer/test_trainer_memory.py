"""After a lost session, the trainer's model is freed before the next start loads one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from trainer_batches import save_tiny_model
from trainer_on_a_log import Producer, Trainer

from operators.io.elements import Restored, ShardFold
from operators.io.fold_records import FoldStep, _FoldFn, close_folds
from operators.trainer import publishing
from operators.trainer.rank_services import RankServices


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    made = Trainer(tmp_path, save_tiny_model(tmp_path / "tiny"))
    monkeypatch.setattr(RankServices, "producer", lambda self, client: Producer(client))
    monkeypatch.setattr(publishing, "ManifestLog", lambda producer, run: made.announce)
    yield made
    close_folds()


@dataclass
class Watched:
    """Wraps `step` and counts the parameters of earlier restores that are alive when the next restore begins."""

    step: FoldStep
    alive: list[int]
    parameters: list[weakref.ref[torch.Tensor]]

    def restore(self, restored: Restored) -> ShardFold:
        self.alive.append(sum(each() is not None for each in self.parameters))
        before = {id(each) for each in gc.get_objects() if issubclass(type(each), torch.nn.Parameter)}
        folder = self.step.restore(restored)
        made = [
            each for each in gc.get_objects() if issubclass(type(each), torch.nn.Parameter) and id(each) not in before
        ]
        self.parameters += map(weakref.ref, made)
        return folder


def test_model_is_freed_before_the_next_start(trainer: Trainer) -> None:
    watched = Watched(trainer.step, [], [])
    fold = _FoldFn(watched)
    for start in (1, 2):
        assert not list(fold.process(Restored("g", start, (), {}, {})))
    assert len(watched.parameters) > 2
    assert watched.alive == [0, 0]
