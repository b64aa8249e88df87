"""A failed checkpoint is retried, then an error; one that was complete after the last commit can be resumed from."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_disk import fill, small_disk
from trainer_on_a_log import Trainer

from infra.kafka.role_notes import NO_NOTES
from operators.trainer import checkpoint, checkpoint_writer, persist, rank_services
from operators.trainer.persist import CheckpointError
from operators.trainer.rank_addresses import AddressFile
from operators.trainer.rank_services import RankServices
from operators.trainer.rank_training import RankTraining, start_rank_training
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.training_config import TrainingConfig
from schemas.topics import BATCHES, RELAY


@pytest.mark.parametrize("what", ["checkpoints", "model"])
def test_failed_checkpoint_is_retried_then_ends_the_trainer(
    trainer: Trainer, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    due = 1 if what == "checkpoints" else 5
    monkeypatch.setattr(persist, "PAUSE_S", 0.0)
    trainer.start()
    trainer.run()
    trainer.feed(*range(6))
    trainer.run(due)
    target = trainer.folder / what
    with small_disk(trainer.folder / "disk", 64) as disk:
        fill(disk)
        if target.exists():
            target.rename(trainer.folder / "before")
        target.symlink_to(disk / "full", target_is_directory=True)
        with pytest.raises(CheckpointError, match=rf"failed after 5 attempts .*: cannot write .* to {target}"):
            trainer.run()
        assert sum("attempt " in record.message for record in caplog.records) == 4
        assert trainer.manifests()[-1][0] == f"1.{due + 1}"
        trainer.shard.crash()
        target.unlink()
    if what == "checkpoints":
        trainer.start()
        trainer.run(7)
        assert trainer.ancestry() == [0, 1, 2, 3, 4, 5]
        assert sorted(each.name for each in target.iterdir()) == ["2.4", "2.6"]


def test_checkpoint_written_by_a_retry_is_valid(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    blocker = trainer.folder / "checkpoints"

    def pause(pause_s: float) -> bool:
        pauses.append(pause_s)
        if len(pauses) == 3:
            blocker.unlink()
        return False

    write = persist.persist
    monkeypatch.setattr(rank_services, "persist", lambda work, tries, wait: write(work, tries, pause))
    trainer.start()
    trainer.run()
    shutil.rmtree(blocker)
    blocker.touch()
    trainer.feed(0, 1)
    trainer.run(2)
    assert pauses == [1.0, 2.0, 4.0]
    assert [each.name for each in blocker.iterdir()] == ["1.2"]


def test_final_model_on_a_full_disk_is_an_error(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(persist, "PAUSE_S", 0.0)
    monkeypatch.setattr(rank_services, "write_model", full)
    trainer.start()
    trainer.run()
    trainer.feed(*range(6))
    with pytest.raises(CheckpointError, match=r"cannot write the final model to .*No space left"):
        trainer.run(6)


@pytest.mark.parametrize("batches", [0, 2])
def test_restart_restores_the_initial_model_before_a_checkpoint(trainer: Trainer, batches: int) -> None:
    """Held-out questions name version 1.0, so its store must have it after any number of starts."""
    trainer.configure(checkpoint_every=100)
    trainer.start()
    trainer.run()
    trainer.feed(*range(batches))
    trainer.run(batches + 1)
    before = trainer.weights("1.0")
    for _ in range(2):
        trainer.shard.crash()
        shutil.rmtree(trainer.folder / "store")
        trainer.start()
        trainer.run(batches + 2)
        after = trainer.weights("1.0")
        assert all((before[name] == after[name]).all() for name in before)
    versions = [version for version, _, _ in trainer.manifests()]
    assert versions == (["1.0", "1.1", "1.2", "2.2", "3.2"] if batches else ["1.0", "2.0", "3.0"])


@pytest.mark.parametrize("clean", [True, False])
def test_clean_stop_keeps_the_newest_version(
    trainer: Trainer, clean: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its successor goes on where it ended, also in an empty store, whose version the manifest restores."""
    stopping = threading.Event()
    monkeypatch.setattr(RankServices, "stopping", stopping)
    trainer.start()
    trainer.run()
    trainer.feed(0, 1, 2)
    trainer.run(5)
    before = trainer.weights("1.3")
    if clean:
        stopping.set()
        trainer.shard.fold.close()  # type: ignore[union-attr]
        stopping.clear()
    trainer.shard.crash()
    shutil.rmtree(trainer.folder / "store")
    trainer.start()
    trainer.run()
    assert ("1.3" in [each.name for each in (tmp_path / "checkpoints").iterdir()]) == clean
    if clean:
        assert all((before[name] == value).all() for name, value in trainer.weights("1.3").items())
        assert trainer.manifests()[-1][0] == "1.3"  # trained once


def test_trainer_goes_on_if_checkpoints_cannot_be_listed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An object store that does not respond for a while: retried at a start, and not needed while it trains."""
    monkeypatch.setattr(persist, "PAUSE_S", 0.0)
    calls, listed = [0], checkpoint.list_checkpoints

    def fail(root: Path) -> Any:
        calls[0] += 1
        if calls[0] % 3:
            raise OSError("503 SlowDown")
        return listed(root)

    def fail_always(root: Path) -> Any:
        raise OSError("503 SlowDown")

    monkeypatch.setattr(checkpoint, "list_checkpoints", fail)
    trainer.start()
    trainer.run()
    monkeypatch.setattr(checkpoint, "list_checkpoints", fail_always)
    trainer.feed(*range(6))
    trainer.run(5)
    assert "a restart will read from an older manifest: the checkpoints in" in caplog.text
    monkeypatch.setattr(checkpoint, "list_checkpoints", fail)
    trainer.start()
    trainer.run(3)
    assert trainer.ancestry() == [0, 1, 2, 3, 4, 5]


def test_trainer_does_not_start_without_a_checkpoint_folder(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "PAUSE_S", 0.0)
    (trainer.folder / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=f"checkpoints cannot be written to {trainer.folder / 'checkpoints'}"):
        trainer.start()


def test_rank_without_a_checkpoint_folder_does_not_join(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist, "PAUSE_S", 0.0)
    (trainer.folder / "checkpoints").touch()
    config = replace(trainer.step.config, ranks=2)
    addresses = AddressFile(trainer.folder / "ranks.json")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written to"):
        start_rank_training(config, trainer.step.model, trainer.folder / "checkpoints", 1, 1, 1, addresses, NO_NOTES)


def test_ranks_with_folders_of_their_own_do_not_start(trainer: Trainer) -> None:
    """They would train until the first checkpoint, which needs the files of all."""
    found, barrier, store = [torch.empty(0)] * 2, threading.Barrier(2), dist.HashStore()

    def start(rank: int) -> None:
        rendezvous = Rendezvous(ThreadRanks(rank, 2, found=found, barrier=barrier), store)
        RankTraining(TrainingConfig(ranks=2), trainer.step.model, trainer.folder / str(rank), 7, rendezvous)

    with ThreadPoolExecutor() as threads:
        first, second = [threads.submit(start, rank) for rank in range(2)]
        with pytest.raises(
            CheckpointError, match=rf"{trainer.folder}/1 on machine .* another folder than that of rank 0"
        ):
            second.result(30)
        with pytest.raises(CheckpointError, match=r"checkpoints in .*/0 cannot be used: see the logs of the other"):
            first.result(30)
    assert not list((trainer.folder / "0").iterdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRanks(Ranks):
    """Ranks that are threads, which exchange `found` at `barrier`."""

    found: list[torch.Tensor]
    barrier: threading.Barrier

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See `Ranks.gather`."""
        self.found[self.rank] = values
        self.barrier.wait(20)
        gathered = list(self.found)
        self.barrier.wait(20)
        return gathered


def test_restart_restores_a_version_of_an_unfinished_checkpoint(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last commit is older than the checkpoint: it must leave the manifest to be read again."""
    released, write = threading.Event(), checkpoint_writer.write_checkpoint

    def write_late(*args: Any, **options: Any) -> None:
        assert released.wait(30)
        write(*args, **options)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write_late)
    trainer.start()
    trainer.run()
    trainer.feed(0, 1)
    deadline = time.monotonic() + 30
    while trainer.committed(BATCHES) < 2 or len(trainer.log.rows(RELAY)) < 3:  # does not wait for the checkpoint of 1.2
        trainer.shard.run()
        assert time.monotonic() < deadline
    trainer.shard.run()
    assert trainer.committed(RELAY) == 2  # the manifest of 1.2
    before = trainer.weights("1.2")
    released.set()
    trainer.shard.fold._checkpoints.finish()  # type: ignore[union-attr]
    trainer.shard.crash()
    shutil.rmtree(trainer.folder / "store")
    trainer.start()
    trainer.run()
    assert all((before[name] == value).all() for name, value in trainer.weights("1.2").items())
