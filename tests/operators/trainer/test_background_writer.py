"""Weights of a version are written while the next update computes, which changes them only afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from trainer_batches import make_batch, save_tiny_model

from infra.runners.stopping import STOPPING
from operators.trainer import rendezvous
from operators.trainer.background_writer import BackgroundWriter
from operators.trainer.config import LearnerConfig
from operators.trainer.rank_lost import RankLost
from operators.trainer.rank_training import RankTraining
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.training_config import TrainingConfig
from operators.trainer.version_file import layout_of
from operators.trainer.weight_parts import WeightPart

CPU = torch.device("cpu")
CONFIG = TrainingConfig(learner=LearnerConfig(warmup_steps=0, micro_batch_tokens=64))


@pytest.fixture
def training(tmp_path: Path) -> RankTraining:
    """A training with one batch."""
    made = RankTraining(CONFIG, save_tiny_model(tmp_path / "model"), tmp_path / "checkpoints", 1)
    (part,) = make_batch(0, number=0)
    made.add_part(part, 0, 0)
    return made


def views_of(training: RankTraining) -> dict[str, np.ndarray]:
    """The bytes of each tensor of a version."""
    layout = layout_of(training.joint.rounded)
    return layout.tensor_views(memoryview(bytearray(layout.size)))


def test_update_computes_while_weights_are_written(training: RankTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    step_reached, write = threading.Event(), WeightPart.write

    def write_late(part: WeightPart, views: dict[str, np.ndarray]) -> None:
        assert step_reached.wait(30)
        write(part, views)

    monkeypatch.setattr(WeightPart, "write", write_late)
    before = {name: tensor.clone() for name, tensor in training.joint.rounded.items()}
    waits = training._learner.before_change

    def reach_step() -> None:
        step_reached.set()
        waits()

    training._learner.before_change = reach_step
    views = views_of(training)
    finish = training.joint.write_to(Path("unused"), views)
    training.train()
    finish()
    assert training.joint.take_waited() > 0
    assert training.joint.take_waited() == 0
    for name, tensor in training.joint.rounded.items():
        written = torch.from_numpy(views[name]).view(tensor.dtype).view(tensor.shape)
        assert torch.equal(written, before[name]), name
    assert not all(torch.equal(tensor, before[name]) for name, tensor in training.joint.rounded.items())


def test_weights_that_cannot_be_written_do_not_change(training: RankTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(WeightPart, "write", fail)
    before = {name: tensor.clone() for name, tensor in training.joint.full.items()}
    finish = training.joint.write_to(Path("unused"), {})
    with pytest.raises(OSError, match="no space left"):
        finish()
    with pytest.raises(OSError, match="no space left"):
        training.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.joint.full.items())


def test_rank_0_waits_for_the_parts_of_all_ranks() -> None:
    store = dist.HashStore()
    ranks = [BackgroundWriter(Rendezvous(Ranks(number, 2), store), CPU) for number in range(2)]
    ended = []
    for number in (1, 2):
        ranks[0].begin((), lambda part: None, number, lambda: None)
        waiting = threading.Thread(target=lambda: ended.append(ranks[0].wait_for_all(number)))  # noqa: B023
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        ranks[1].begin((), lambda part: None, number, lambda: None)
        waiting.join(30)
    assert len(ended) == 2


def test_transfer_to_a_rank_that_has_ended_loses_the_rank() -> None:
    def fail() -> Iterator[None]:
        yield
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    writer = BackgroundWriter(Rendezvous(), CPU)
    closed = list[int]()
    writer.begin((), lambda part: None, 1, lambda: closed.append(1), fail())
    with pytest.raises(RankLost, match="another rank has ended"):
        writer.wait()
    assert closed == [1]
    with pytest.raises(RankLost, match="another rank has ended"):
        writer.check()


def test_close_ends_a_transfer_between_two_messages() -> None:
    begun, release = threading.Event(), threading.Event()
    messages = list[int]()

    def transfer() -> Iterator[None]:
        for number in range(3):
            messages.append(number)
            begun.set()
            assert release.wait(30)
            yield

    store = dist.HashStore()
    writer = BackgroundWriter(Rendezvous(Ranks(1, 2), store), CPU)
    writer.begin((), lambda part: None, 1, lambda: None, transfer())
    assert begun.wait(30)
    closing = threading.Thread(target=writer.close)
    closing.start()
    assert writer._closed.wait(30)
    release.set()
    closing.join(30)
    assert messages == [0]
    assert not writer.written_by(1, 1)
    with pytest.raises(RankLost, match="stops before all parts"):
        writer.wait()


@pytest.mark.parametrize("ends", ["close", "stop", "rejoin", "timeout"])
def test_rank_0_waits_for_no_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    store = dist.HashStore()
    writer = BackgroundWriter(Rendezvous(Ranks(0, 2, timeout_s=0.1 if ends == "timeout" else 60.0), store), CPU)
    writer.begin((), lambda part: None, 1, lambda: None)
    if ends == "close":
        writer.close()
    elif ends == "stop":
        monkeypatch.setattr(rendezvous, "STOP_WAIT_S", 0.0)
        STOPPING.set()
    elif ends == "rejoin":
        store.add("rejoins", 1)
    try:
        with pytest.raises(RankLost, match="another rank has restarted" if ends == "rejoin" else "has not written"):
            writer.wait_for_all(1)
    finally:
        STOPPING.clear()
