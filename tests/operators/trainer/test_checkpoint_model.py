"""The model of a checkpoint is written one tensor at a time, to the files that a learner with its state saves."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_batches import make_batch, save_experts, save_tiny_model

from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import StoredState, TrainerPosition
from operators.trainer.checkpoint_model import write_checkpoint_model
from operators.trainer.config import AlgorithmConfig, LearnerConfig, LoraConfig
from operators.trainer.critic import Critic
from operators.trainer.learner import Learner
from operators.trainer.persist import CheckpointError
from operators.trainer.replay import Replay
from operators.trainer.trained_model import TrainedModel
from operators.trainer.training_config import TrainingConfig
from pipelines.config import Config
from pipelines.inspect.weight_places import WeightPlace
from pipelines.run.weight_copies import pull_from_place
from schemas.records import PolicyVersion

PLAIN = LearnerConfig(learning_rate=1e-2, warmup_steps=0)
LORA = replace(PLAIN, lora=LoraConfig(rank=4, alpha=8))
ATTENTION = replace(PLAIN, lora=LoraConfig(rank=4, alpha=8, targets=("q_proj", "v_proj")))
PENALTY = AlgorithmConfig(name="ppo", kl_coefficient=0.1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "model")
    save_experts(folder / "experts")
    for file in (folder / "model").glob("token*"):
        (folder / "experts" / file.name).write_bytes(file.read_bytes())
    return folder


def checkpoint_of(learner: Learner, folder: Path) -> Path:
    """A checkpoint after one batch."""
    learner.update(make_batch())
    return write_checkpoint(folder, learner.state(), TrainerPosition(PolicyVersion(1, 1), (0,), 0))


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("kind", "config"),
    [("model", replace(PLAIN, algorithm=PENALTY)), ("model", LORA), ("experts", PLAIN), ("experts", ATTENTION)],
    ids=["critic and reference", "adapters", "experts", "adapters beside experts"],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_pulled_checkpoint_is_what_its_learner_saves(
    models: Path, tmp_path: Path, kind: str, config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config.lora.rank:
        pytest.importorskip("peft", reason="the extra `lora` is not installed")
    base, training = models / kind, TrainingConfig(learner=config)
    checkpoint = checkpoint_of(Learner(config, base), tmp_path / "checkpoints")
    Replay(training, base, checkpoint=checkpoint).save(tmp_path / "expected")

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a model to train is opened")

    for each in (Learner, Critic, TrainedModel):
        monkeypatch.setattr(each, "__init__", forbidden)
    read: list[weakref.ref[object]] = []
    whole = StoredState.tensor

    def tensor(self: StoredState, name: str) -> object:
        assert name.startswith("weights.")
        assert config.lora.rank or sum(each() is not None for each in read) <= 1
        read.append(weakref.ref(found := whole(self, name)))
        return found

    monkeypatch.setattr(StoredState, "tensor", tensor)
    place = WeightPlace("checkpoint", checkpoint)
    pull_from_place(place, Config(trainer=training), base, tmp_path / "found")
    expected = files_in(tmp_path / "expected")
    assert files_in(tmp_path / "found") == expected
    assert read
    assert expected["model.safetensors"] != (base / "model.safetensors").read_bytes()


def test_damaged_checkpoint_is_not_written(models: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Learner(PLAIN, models / "model"), tmp_path / "checkpoints")
    with (checkpoint / "rank-0-of-1.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with pytest.raises(CheckpointError, match="is damaged"):
        write_checkpoint_model(checkpoint, LoraConfig(), models / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_another_model_is_rejected(models: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Learner(PLAIN, models / "model"), tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="the state's weights do not match the model"):
        write_checkpoint_model(checkpoint, LoraConfig(), models / "experts", tmp_path / "out")
