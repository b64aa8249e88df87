"""Checkpoints are written in the background from live memory; the next optimizer step waits for them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stored_states import read_checkpoint
from trainer_batches import make_batch, save_tiny_model

from infra.models.checkpoint_list import list_checkpoints
from infra.system import OperatingSystem
from operators.io.elements import Output, Polled
from operators.trainer import checkpoint, checkpoint_writer, joint_actions, rank_training, version_file
from operators.trainer.assembly import CannotTrain
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.checkpoint_writer import CheckpointWriter
from operators.trainer.clean_stop import fold_with_ranks, keep_newest, keep_with_rank_0
from operators.trainer.config import LearnerConfig, LoraConfig
from operators.trainer.learner import Learner
from operators.trainer.persist import CheckpointError
from operators.trainer.published_weights import PublishedWeights
from operators.trainer.rank_services import RankServices
from operators.trainer.rank_training import RankTraining
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.train_follower import _FollowerTraining
from operators.trainer.training_config import TrainingConfig
from schemas.records import PolicyVersion

CONFIG = TrainingConfig(learner=LearnerConfig(warmup_steps=0, micro_batch_tokens=64), checkpoint_tries=1)


@pytest.fixture
def training(tmp_path: Path) -> RankTraining:
    """A training with two batches, of which one is trained."""
    made = RankTraining(CONFIG, save_tiny_model(tmp_path / "model"), tmp_path / "checkpoints", 1)
    for number in range(2):
        (part,) = make_batch(number, number=number)
        made.add_part(part, 0, number)
    made.train()
    return made


def test_optimizer_step_waits_until_the_checkpoint_is_written(
    tmp_path: Path, training: RankTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in training.state().weights.items()}
    step_reached = threading.Event()

    def write_late(*args: object, **options: object) -> None:
        assert step_reached.wait(30)
        write_checkpoint(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write_late)
    training.before_change(step_reached.set)
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    writer.begin()
    assert not writer.finished()
    training.train()
    assert writer.finished()
    assert not writer.finished()
    (folder,) = list_checkpoints(tmp_path / "checkpoints")
    saved, _ = read_checkpoint(folder)
    assert all(torch.equal(saved.weights[name], before[name]) for name in before)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in training.state().weights.items())
    writer.close()


def test_checkpoint_is_copied_on_a_stream_of_its_own(
    tmp_path: Path, training: RankTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, once the last step is done: otherwise its pieces wait for the kernels of the next batch."""
    calls: list[tuple[str, object, bool]] = []
    main = threading.get_ident()

    def record(name: str) -> Callable[[object], None]:
        return lambda what: calls.append((name, what, threading.get_ident() == main))

    for name in ("set_device", "set_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, record(name))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "own")
    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", lambda *_, **__: record("write")("part"))
    training.device = torch.device("cuda:3")
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    writer.begin()
    writer.finish()
    writer.close()
    of_thread = [("set_device", 3, False), ("set_stream", "own", False)]
    assert [call for call in calls if not call[2]] == [*of_thread, ("write", "part", False)]
    assert [call for call in calls if call[2]] == [("synchronize", torch.device("cuda:3"), True)]


def test_other_ranks_are_watched_during_an_update(training: RankTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[Rendezvous, torch.device]] = []

    @contextmanager
    def record(*what: Any) -> Iterator[None]:
        before = training.model.lm_head.weight.clone()
        yield
        assert not torch.equal(training.model.lm_head.weight, before)
        watched.append(what)

    monkeypatch.setattr(rank_training, "watch_ranks", record)
    training.train()
    assert watched == [(training.rendezvous, torch.device("cpu"))]


def test_other_ranks_are_watched_wherever_layers_are_gathered(
    tmp_path: Path, training: RankTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL a rank would wait `collective_timeout_s` for one that has ended."""
    watching, done = list[bool](), list[str]()

    @contextmanager
    def watch(*_: object) -> Iterator[None]:
        watching.append(True)
        yield
        watching.pop()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*arguments: Any, **options: Any) -> Any:
            done.append(name if watching else f"{name}, not watched")
            return call(*arguments, **options)

        return noted_call

    for module in (rank_training, joint_actions):
        monkeypatch.setattr(module, "watch_ranks", watch)
    monkeypatch.setattr(joint_actions, "open_file", lambda *_: nullcontext(None))
    monkeypatch.setattr(joint_actions, "ranks_without_file", noted("find ranks", lambda *_: [1]))
    monkeypatch.setattr(joint_actions, "write_parts", noted("write", lambda *_: None))
    monkeypatch.setattr(PublishedWeights, "at_hand", False)
    monkeypatch.setattr(PublishedWeights, "items", noted("gather", PublishedWeights.items))
    monkeypatch.setattr(RankServices, "open_learner", noted("open", RankServices.open_learner))
    monkeypatch.setattr(Learner, "restore", noted("restore", Learner.restore))
    write_checkpoint(tmp_path / "checkpoints", training.state(), training.position)
    resumed = RankTraining(CONFIG, tmp_path / "model", tmp_path / "checkpoints", 2)
    assert resumed.resumed_from == PolicyVersion(1, 1)
    resumed.joint.write_to(tmp_path / "model" / "config.json", {})
    resumed.joint.wait_until_written()
    for action in (joint_actions._Action.WRITE, joint_actions._Action.GATHER):
        assert resumed.joint._join(action)
    list(resumed.joint.gather())
    assert done == ["open", "restore", *2 * ("find ranks", "write"), "gather", "gather"]


def test_ranks_that_gather_are_in_step(training: RankTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[int]()

    def wait(ranks: Ranks, number: float) -> float:
        waits.append(ranks.rank)
        return number

    monkeypatch.setattr(version_file, "_TOGETHER_BYTES", 1)
    monkeypatch.setattr(Ranks, "maximum", wait)
    tensors = len(list(training.joint.gather()))
    assert len(waits) == tensors
    assert training.joint._join(joint_actions._Action.GATHER)
    assert len(waits) == 2 * tensors


def test_ranks_fold_on_their_device_on_every_thread(training: RankTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: selected.append((threading.get_ident(), number)))
    training.device = torch.device("cuda:2")
    folds = list[int]()

    def fold() -> list[Output]:
        folds.append(threading.get_ident())
        return []

    other = threading.Thread(target=lambda: fold_with_ranks(training, fold))
    other.start()
    other.join()
    fold_with_ranks(training, fold)
    assert selected == [(thread, 2) for thread in folds]
    assert len(set(folds)) == 2


def test_failed_checkpoint_fails_the_next_optimizer_step(tmp_path: Path, training: RankTraining) -> None:
    (tmp_path / "checkpoints").touch()
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    before = {name: tensor.clone() for name, tensor in training.state().weights.items()}
    writer.begin()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint 1\.1"):
        training.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.state().weights.items())
    writer.close()


def test_idle_follower_ends_if_its_part_of_a_checkpoint_fails(tmp_path: Path, training: RankTraining) -> None:
    """Rank 0 would wait for the part for ever: after the last batch no optimizer step raises the error."""
    (tmp_path / "checkpoints").touch()
    training.train()
    training.ranks = Ranks(1, 2)
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    follower = _FollowerTraining(training, writer)
    writer.begin()
    with pytest.raises(CheckpointError):
        writer.wait_for_own_part()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint 1\.2"):
        follower.fold(Polled("trainer", 1, (), (), {}, caught_up=True))
    writer.close()


def test_clean_stop_goes_on_if_checkpoints_cannot_be_listed(
    tmp_path: Path, training: RankTraining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> list[Path]:
        raise OSError("the object store does not respond")

    monkeypatch.setattr(checkpoint, "list_checkpoints", refuse)
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    keep_newest(training, writer, lambda: True)
    assert re.search(r"without a checkpoint of version 1\.1: .* the object store does not respond", caplog.text)
    writer.close()


@pytest.mark.parametrize("note", ["keep", "leave"])
def test_clean_stop_waits_for_a_decision_of_rank_0_however_late(
    note: str, tmp_path: Path, training: RankTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now, services = dist.HashStore(), [0.0], RankServices()
    training.rendezvous = Rendezvous(Ranks(1, 2), store, services)
    training.joint.stop = lambda: None  # type: ignore[method-assign]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 3600:
            training.rendezvous.post("clean stop", note)

    services.system = OperatingSystem()
    services.system.sleep = sleep  # type: ignore[method-assign]
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    begun: list[PolicyVersion] = []
    monkeypatch.setattr(writer, "begin", lambda: begun.append(training.position.version))
    keep_with_rank_0(training, writer)
    assert begun == ([PolicyVersion(1, 1)] if note == "keep" else [])
    writer.close()


def test_clean_stop_ends_if_rank_0_ends_before_its_decision(
    tmp_path: Path, training: RankTraining, caplog: pytest.LogCaptureFixture
) -> None:
    class Ended(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection reset")

    training.rendezvous = Rendezvous(Ranks(1, 2), Ended())
    training.joint.stop = lambda: None  # type: ignore[method-assign]
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    keep_with_rank_0(training, writer)
    assert "without this rank's part of version 1.1: rank 0 has ended" in caplog.text
    writer.close()


def test_ranks_with_other_checkpoints_are_rejected_unread(tmp_path: Path, training: RankTraining) -> None:
    class WithoutCheckpoint(Ranks):
        """This rank, and one on a machine whose folder has no checkpoint."""

        def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
            return [values, torch.zeros_like(values)]

    (tmp_path / "checkpoints" / "1.7").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"do not begin with the same checkpoint.*: \[\[1, 7\], \[0, 0\]\]"):
        RankTraining(CONFIG, tmp_path / "model", tmp_path / "checkpoints", 2, Rendezvous(WithoutCheckpoint()))


def test_checkpoint_of_other_partitions_is_rejected(tmp_path: Path, training: RankTraining) -> None:
    position = TrainerPosition(PolicyVersion(1, 1), (3, 4), 8)
    write_checkpoint(tmp_path / "checkpoints", training.state(), position)
    with pytest.raises(
        CannotTrain, match=r"1\.1 is of a run with 2 partitions .*ranks\) = 1 .* Set trainer\.batch_shares = 2; trainer"
    ):
        RankTraining(CONFIG, tmp_path / "model", tmp_path / "checkpoints", 2)


def test_checkpoint_of_another_learner_is_rejected(tmp_path: Path, training: RankTraining) -> None:
    write_checkpoint(tmp_path / "checkpoints", training.state(), TrainerPosition(PolicyVersion(1, 1), (3,), 8))
    other = TrainingConfig(learner=LearnerConfig(lora=LoraConfig(rank=2)), checkpoint_tries=1)
    with pytest.raises(CannotTrain, match=r"checkpoint .*1\.1 cannot be resumed from: .* do not match the adapters"):
        RankTraining(other, tmp_path / "model", tmp_path / "checkpoints", 2)


def test_checkpoint_being_written_counts_as_kept(
    tmp_path: Path, training: RankTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may have completed it: its successor then needs the manifest of that version."""
    written = threading.Event()
    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", lambda *_, **__: written.wait(30))
    writer = CheckpointWriter(CONFIG, training, tmp_path / "checkpoints")
    assert writer.kept() == []
    writer.begin()
    assert writer.kept() == [PolicyVersion(1, 1)]
    written.set()
    writer.finish()
    assert writer.kept() == []  # this test's write has left nothing
    writer.close()
