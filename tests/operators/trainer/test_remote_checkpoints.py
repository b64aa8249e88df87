"""Checkpoints in an object store: atomic, bit-identical when read back, pruned as on a disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist
from object_store import ObjectStore, object_store
from stored_states import read_checkpoint
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_batches import make_batch, save_tiny_model
from trainer_on_a_log import Trainer

from infra.models.checkpoint_list import MANIFEST, list_checkpoints
from infra.storage import RemotePath
from operators.trainer.checkpoint import (
    CheckpointPositions,
    check_writable,
    complete_checkpoint,
    read_position,
    write_checkpoint,
    write_part,
)
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.learner_state import LearnerState
from operators.trainer.persist import CheckpointError, persist
from operators.trainer.ranks import Ranks
from operators.trainer.training_config import TrainingConfig
from pipelines.config import Config, RunConfig
from pipelines.training_step import checkpoints_of
from schemas.records import PolicyVersion


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    made = Learner(LearnerConfig(micro_batch_tokens=64), save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))
    made.update(make_batch())
    return made


def position(number: int) -> TrainerPosition:
    return TrainerPosition(PolicyVersion(1, number), (number * 3,), number * 16)


def names(root: RemotePath) -> list[str]:
    return [folder.name for folder in list_checkpoints(root)]


def test_remote_checkpoint_round_trip_is_bit_identical(store: ObjectStore, learner: Learner) -> None:
    root = RemotePath(store.bucket("bits"))
    assert names(root) == []
    assert set(CheckpointPositions(root)().values()) == {0}
    check_writable(root)
    state = learner.state()
    written = write_checkpoint(root, state, position(4))
    assert read_position(written) == position(4)
    found, where = read_checkpoint(list_checkpoints(root)[-1])
    assert where == position(4)
    assert all(torch.equal(found.weights[name], state.weights[name]) for name in state.weights)
    assert all(torch.equal(found.moments[name], state.moments[name]) for name in state.moments)
    assert set(CheckpointPositions(root)().values()) == {12}
    with pytest.raises(CheckpointError, match=r"s3://bits/folder already has a checkpoint of version 1\.4"):
        write_checkpoint(root, state, position(4))


def shards_of(state: LearnerState, rank: int) -> LearnerState:
    """`state` as rank `rank` of two holds it: without the other rank's rows of each tensor."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: DTensor.from_local(
                each.split(-(-len(each) // 2))[rank] if len(each) > 1 or rank == 0 else each[:0],
                mesh,
                [Shard(0)],
                run_check=False,
                shape=each.shape,
                stride=each.stride(),
            )
            if each.ndim
            else each
            for name, each in tensors.items()
        }

    return replace(state, weights=sharded(state.weights), moments=sharded(state.moments))


def test_remote_checkpoint_of_two_ranks_is_read_whole(store: ObjectStore, learner: Learner) -> None:
    root, state = RemotePath(store.bucket("ranks")), learner.state()
    files = {}
    for rank in (1, 0):
        own = shards_of(state, rank)
        try:
            files[rank] = write_part(root, own, position(4), Ranks(rank, 2))
            assert names(root) == []  # without a manifest it is no checkpoint
            if rank == 0:
                complete_checkpoint(root, own, position(4), [files[0], files[1]])
        finally:
            dist.destroy_process_group()
    (folder,) = list_checkpoints(root)
    assert sorted(file.name for file in files.values()) == [f"rank-{rank}-of-2.safetensors" for rank in (0, 1)]
    assert all(file.bytes == len((folder / file.name).read_bytes()) > 10_000 for file in files.values())
    found, where = read_checkpoint(folder)
    assert where == position(4)
    for stored, whole in ((found.weights, state.weights), (found.moments, state.moments)):
        assert stored.keys() == whole.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in whole.items())


def test_killed_trainer_resumes_from_an_object_store(store: ObjectStore, trainer: Trainer) -> None:
    """Its machine's disk is gone: only the checkpoint and the log remain."""
    settings = TrainingConfig(checkpoint_folder=store.bucket("resumed"))
    root = checkpoints_of(replace(Config(), run=RunConfig("mine"), trainer=settings))
    assert isinstance(root, RemotePath)
    trainer.step = replace(trainer.step, checkpoints=root)
    trainer.configure(checkpoint_folder=settings.checkpoint_folder)
    trainer.start()
    trainer.run()
    trainer.feed(0, 1, 2)
    trainer.run(4)
    before = trainer.weights("1.3")
    assert names(root) == ["1.2"]
    trainer.shard.crash()
    shutil.rmtree(trainer.folder / "store")
    trainer.feed(3, 4, 5)
    trainer.start()
    trainer.run(8)
    assert trainer.manifests()[4] == ("2.3", "1.2", (2,))
    assert all((before[name] == value).all() for name, value in trainer.weights("2.3").items())
    assert trainer.ancestry() == list(range(6))
    assert names(root) == ["2.4", "2.6"]
    assert not (trainer.folder / "checkpoints").exists()


def test_remote_checkpoints_are_pruned(store: ObjectStore, learner: Learner) -> None:
    root = RemotePath(store.bucket("pruned"))
    for number in (2, 4, 6, 8, 10):
        write_checkpoint(root, learner.state(), position(number), keep=2, keep_every=4)
    assert names(root) == ["1.4", "1.8", "1.10"]


def test_remote_checkpoint_needs_the_files_of_all_ranks(store: ObjectStore, learner: Learner) -> None:
    root, other, state = RemotePath(store.bucket("here")), RemotePath(store.bucket("there")), learner.state()
    files = [write_part(place, state, position(4), Ranks(rank, 2)) for rank, place in enumerate((root, other))]
    with pytest.raises(CheckpointError, match=r"s3://here/.*/rank-1-of-2\.safetensors has 0 of the .* bytes"):
        complete_checkpoint(root, state, position(4), files)
    assert names(root) == []


def test_remote_parts_of_unfinished_checkpoints_are_removed(store: ObjectStore, learner: Learner) -> None:
    """Those of older versions: another rank may have begun the next one."""
    root, state = RemotePath(store.bucket("parts")), learner.state()
    for number in (2, 6):
        write_part(root, state, position(number), Ranks(1, 2))
    (root / "notes" / "of a user").write_bytes(b"x")
    write_checkpoint(root, state, position(4))
    assert [each.name for each in root.iterdir()] == ["1.4", "1.6", "notes"]


@pytest.mark.parametrize("uploaded", [0, 1])
def test_interrupted_upload_is_not_a_checkpoint(
    store: ObjectStore, learner: Learner, uploaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = RemotePath(store.bucket(f"cut-{uploaded}"))
    write_checkpoint(root, learner.state(), position(2))
    open_output, left = RemotePath.open_output, uploaded

    def cut(self: RemotePath) -> object:
        nonlocal left
        if not left:
            raise OSError("the connection was reset")
        left -= 1
        return open_output(self)

    with monkeypatch.context() as cutting:
        cutting.setattr(RemotePath, "open_output", cut)
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint 1\.4 to s3://cut-.* still 1\.2\): .*reset"):
            write_checkpoint(root, learner.state(), position(4))
    assert names(root) == ["1.2"]
    write_checkpoint(root, learner.state(), position(4))
    assert names(root) == ["1.2", "1.4"]


def test_checkpoint_is_complete_if_its_response_is_lost(
    store: ObjectStore, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = RemotePath(store.bucket("lost")), learner.state()
    open_output, failures = RemotePath.open_output, [OSError("the connection was reset")]

    @contextmanager
    def store_then_fail(self: RemotePath) -> Iterator[BinaryIO]:
        with open_output(self) as sink:
            yield sink
        if self.name == MANIFEST and failures:
            raise failures.pop()

    monkeypatch.setattr(RemotePath, "open_output", store_then_fail)
    folder = write_checkpoint(root, state, position(4), retry=lambda write: persist(write, 2, lambda _: False))
    assert not failures
    assert read_checkpoint(folder)[1] == position(4)


def test_damaged_remote_checkpoint_is_named(store: ObjectStore, learner: Learner) -> None:
    root = RemotePath(store.bucket("damaged"))
    folder = write_checkpoint(root, learner.state(), position(2))
    data = bytearray((folder / "rank-0-of-1.safetensors").read_bytes())
    data[-1] ^= 1
    assert isinstance(folder, RemotePath)
    (folder / "rank-0-of-1.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"s3://damaged/folder/1\.2/rank-0-of-1\.safetensors is damaged"):
        read_checkpoint(folder)


def test_check_writable_names_an_inaccessible_store(store: ObjectStore) -> None:
    with pytest.raises(CheckpointError, match=r"written to s3://none/folder.*: .*NO_SUCH_BUCKET"):
        check_writable(RemotePath(store.uri("none/folder")))
