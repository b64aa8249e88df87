"""Checkpoints: resuming is bit-identical, writes are atomic, damage is reported."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from stored_states import read_checkpoint
from trainer_batches import make_batch, save_tiny_model

from infra.files import sync_path
from infra.models.checkpoint_list import list_checkpoints
from operators.trainer import checkpoint, replay
from operators.trainer.checkpoint import complete_checkpoint, read_position, write_checkpoint, write_part
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import AlgorithmConfig, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.learner_state import LearnerState
from operators.trainer.persist import CheckpointError, persist
from operators.trainer.ranks import Ranks
from operators.trainer.replay import Replay
from operators.trainer.training_config import TrainingConfig
from schemas.records import PolicyVersion

CONFIG = LearnerConfig(
    learning_rate=1e-2, warmup_steps=2, schedule="cosine", total_steps=9, weight_decay=0.01, micro_batch_tokens=64
)

WITH_CRITIC = replace(CONFIG, algorithm=AlgorithmConfig(name="ppo"), mini_batches=2)


def position(number: int, epoch: int = 1) -> TrainerPosition:
    return TrainerPosition(PolicyVersion(epoch, number), (number * 3, 7), number * 16)


def same(one: LearnerState, other: LearnerState) -> bool:
    tensors = all(
        set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in (
            (one.weights, other.weights),
            (one.moments, other.moments),
            (one.critic_weights, other.critic_weights),
            (one.critic_moments, other.critic_moments),
        )
    )
    scalars = (one.updates, one.skipped_updates) == (other.updates, other.skipped_updates)
    return tensors and scalars and torch.equal(one.random_state, other.random_state)


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    made = Learner(CONFIG, save_tiny_model(tmp_path / "model"))
    made.update(make_batch())
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_replaying_ranks_verify_each_a_part_of_the_files(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A file that is damaged ends all ranks."""
    folder = write_checkpoint(tmp_path / "checkpoints", learner.state(), position(1))
    (file,) = folder.glob("*.safetensors")  # type: ignore[attr-defined]
    file.write_bytes(bytes([*file.read_bytes()[:-1], 99]))
    found = list[float]()

    def maximum(ranks: Ranks, number: float) -> float:
        found.append(number)
        return 1.0

    monkeypatch.setattr(replay, "open_learner", Mock())
    monkeypatch.setattr(Ranks, "maximum", maximum)
    with pytest.raises(CheckpointError, match="see the logs of the other ranks" if rank else "is damaged"):
        Replay(TrainingConfig(ranks=2), tmp_path / "model", Ranks(rank, 2), checkpoint=folder)  # type: ignore[arg-type]
    assert found == [rank == 0]


@pytest.mark.parametrize(
    ("before", "config"), [(0, CONFIG), (1, CONFIG), (4, CONFIG), (0, WITH_CRITIC), (2, WITH_CRITIC)]
)
def test_resume_is_bit_identical(tmp_path: Path, before: int, config: LearnerConfig) -> None:
    model, other_model = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", seed=5)
    through = Learner(config, model)
    for number in range(before):
        through.update(make_batch(seed=number))
    torch.manual_seed(17)
    folder = write_checkpoint(tmp_path / "checkpoints", through.state(), position(before))
    drawn = torch.rand(3)
    resumed = Learner(config, other_model)  # with different weights, so that all must come from the checkpoint
    state, found = read_checkpoint(folder)
    resumed.restore(state)
    assert found == read_position(folder) == position(before)
    assert torch.equal(torch.rand(3), drawn)
    for number in range(before, before + 3):
        through.update(make_batch(seed=number))
        resumed.update(make_batch(seed=number))
    state = resumed.state()
    assert same(through.state(), replace(state, random_state=through.state().random_state))


def test_restore_copies_the_state(tmp_path: Path, learner: Learner) -> None:
    state, _ = read_checkpoint(write_checkpoint(tmp_path / "checkpoints", learner.state(), position(1)))
    kept, _ = read_checkpoint(tmp_path / "checkpoints" / "1.1")
    learner.restore(state)
    learner.update(make_batch(seed=1))
    assert same(state, kept)


def test_newest_checkpoints_are_kept_by_version(tmp_path: Path, learner: Learner) -> None:
    for epoch, number in ((1, 9), (1, 10), (2, 3)):
        write_checkpoint(tmp_path / "checkpoints", learner.state(), position(number, epoch), keep=2)
    assert [folder.name for folder in list_checkpoints(tmp_path / "checkpoints")] == ["1.10", "2.3"]
    assert list_checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(ValueError, match="keep"):
        write_checkpoint(tmp_path / "checkpoints", learner.state(), position(11), keep=0)


def test_failed_removal_of_a_checkpoint_is_only_logged(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = shutil.rmtree

    def refuse(folder: Path, *rest: object, **options: object) -> None:
        if folder.name == "1.1":
            raise PermissionError(1, "not permitted", str(folder))
        remove(folder, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(shutil, "rmtree", refuse)
    for number in (1, 2, 3, 4):
        write_checkpoint(tmp_path / "c", learner.state(), position(number), keep=1)
    assert [folder.name for folder in list_checkpoints(tmp_path / "c")][-1] == "1.4"
    assert caplog.text.count("cannot remove an expired checkpoint") == 3


def test_keep_every_keeps_checkpoints_for_good(tmp_path: Path, learner: Learner) -> None:
    for number in range(1, 8):
        write_checkpoint(tmp_path, learner.state(), position(number), keep=2, keep_every=3)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["1.3", "1.6", "1.7"]


def test_full_disk_leaves_only_the_old_checkpoint(tmp_path: Path, learner: Learner) -> None:
    root = tmp_path / "checkpoints"
    write_checkpoint(root, learner.state(), position(1), keep=1)
    before, _ = read_checkpoint(root / "1.1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (10_000, limits[1])
    )  # the kernel rejects further writes, as with a full disk
    try:
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint 1\.2 .*the newest is still 1\.1"):
            write_checkpoint(root, learner.state(), position(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(root) == ["1.1"]
    assert same(read_checkpoint(root / "1.1")[0], before)


def test_unfinished_checkpoint_is_ignored_and_removed(tmp_path: Path, learner: Learner) -> None:
    root = tmp_path / "checkpoints"
    write_checkpoint(root, learner.state(), position(1))
    (root / "1.1").rename(root / ".unfinished-1.1")
    assert list_checkpoints(root) == []
    write_checkpoint(root, learner.state(), position(2))
    assert os.listdir(root) == ["1.2"]


def test_parts_of_the_next_checkpoint_outlive_a_complete_one(tmp_path: Path, learner: Learner) -> None:
    """A rank may write its part of the next checkpoint while rank 0 completes this one."""
    state, ranks = learner.state(), [Ranks(rank, 2) for rank in range(2)]
    first = [write_part(tmp_path, state, position(1), each) for each in ranks]
    part = write_part(tmp_path, state, position(2), ranks[1])
    complete_checkpoint(tmp_path, state, position(1), first)
    second = [write_part(tmp_path, state, position(2), ranks[0]), part]
    folder = complete_checkpoint(tmp_path, state, position(2), second)
    assert same(read_checkpoint(folder)[0], state)


@pytest.mark.parametrize("written", [0, 100], ids=["absent", "shorter"])
def test_checkpoint_needs_the_files_of_all_ranks(tmp_path: Path, learner: Learner, written: int) -> None:
    """Ranks on machines without a shared disk each write to a folder of their own."""
    state = learner.state()
    write_checkpoint(tmp_path / "shared", state, position(1), keep=1)
    files = [write_part(tmp_path / place, state, position(2), Ranks(r, 2)) for r, place in enumerate(("shared", "own"))]
    if written:
        (tmp_path / "shared" / ".unfinished-1.2" / files[1].name).write_bytes(bytes(written))
    reason = rf"rank-1-of-2\.safetensors has {written} of the {files[1].bytes} bytes .* mount one disk there"
    with pytest.raises(CheckpointError, match=reason):
        complete_checkpoint(tmp_path / "shared", state, position(2), files, keep=1)
    assert [folder.name for folder in list_checkpoints(tmp_path / "shared")] == ["1.1"]


def test_version_has_at_most_one_checkpoint(tmp_path: Path, learner: Learner) -> None:
    write_checkpoint(tmp_path, learner.state(), position(1))
    with pytest.raises(CheckpointError, match="already"):
        write_checkpoint(tmp_path, learner.state(), position(1))
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["1.1"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_is_complete_if_its_sync_fails_once(
    tmp_path: Path, learner: Learner, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS may report: the folder is renamed, so there is nothing left to write again."""
    state, failures = learner.state(), [OSError(errno.ESTALE, "Stale file handle")]

    def sync(path: Path) -> None:
        if path == tmp_path and failures:
            raise failures.pop()
        sync_path(path)

    def retry(write: Callable[[], Any]) -> Any:
        return persist(write, 2, lambda _: False)

    monkeypatch.setattr(checkpoint, "sync_path", sync)
    if ranks == 1:
        folder = write_checkpoint(tmp_path, state, position(1), retry=retry)
    else:
        files = [write_part(tmp_path, state, position(1), Ranks(rank, ranks)) for rank in range(ranks)]
        folder = retry(lambda: complete_checkpoint(tmp_path, state, position(1), files))
        with pytest.raises(CheckpointError, match=r"already has a checkpoint of version 1\.1"):
            retry(lambda: complete_checkpoint(tmp_path, state, position(1), files[:1]))
    assert not failures
    assert same(read_checkpoint(folder)[0], state)


def test_failed_search_for_leftovers_is_only_logged(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "glob", fail)
    folder = write_checkpoint(tmp_path, learner.state(), position(1))
    assert read_position(folder) == position(1)
    assert "cannot remove the parts of an unfinished checkpoint" in caplog.text


@pytest.mark.parametrize("name", ["rank-0-of-1.safetensors", "checkpoint.json"])
def test_read_checkpoint_rejects_damage(tmp_path: Path, learner: Learner, name: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", learner.state(), position(1))
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2 :] = b"\0" * (len(content) - len(content) // 2)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"1\.1"):
        read_checkpoint(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"1\.1"):
        read_checkpoint(folder)


def test_read_checkpoint_rejects_another_format(tmp_path: Path, learner: Learner) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", learner.state(), position(1))
    scalars = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**scalars, "format": 1}))
    for read in (read_checkpoint, read_position):
        with pytest.raises(CheckpointError, match="format 1, not 2"):
            read(folder)


def test_restore_rejects_the_state_of_another_model(tmp_path: Path, learner: Learner) -> None:
    state = learner.state()
    name = next(iter(state.weights))
    broken = [
        replace(state, weights={k: v for k, v in state.weights.items() if k != name}),
        replace(state, weights={**state.weights, name: torch.zeros(3)}),
        replace(state, moments={k: v for k, v in state.moments.items() if k != f"exp_avg.{name}"}),
        replace(state, moments={**state.moments, f"exp_avg_sq.{name}": torch.zeros(3)}),
    ]
    other = Learner(CONFIG, save_tiny_model(tmp_path / "other", seed=3))
    other.update(make_batch(seed=8))
    before = {k: v.clone() for k, v in other.state().weights.items()}
    moments = {k: v.clone() for k, v in other.state().moments.items()}
    for wrong in broken:
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            other.restore(wrong)
        now = other.state()
        assert all(torch.equal(now.weights[k], before[k]) for k in before)
        assert set(now.moments) == set(moments)
        assert all(torch.equal(now.moments[k], moments[k]) for k in moments)
