"""A role whose next start would fail again ends with CANNOT_RUN, so it is not restarted."""

from __future__ import annotations

import json
import logging
from errno import ENOSPC
from pathlib import Path

import pytest
import torch

from infra import memory
from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from infra.runners import role_logging
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate
from operators.rollout.replica_memory import choose_slots
from operators.trainer.assembly import CannotTrain, MissingBatch
from operators.trainer.config import LearnerConfig
from operators.trainer.persist import CheckpointError, CheckpointsUnavailable, persist
from operators.trainer.rank_checks import check_device_memory
from operators.trainer.rank_training import RankTraining
from operators.trainer.training_config import TrainingConfig
from pipelines import config as configs
from pipelines import roles
from pipelines.run import zygote
from schemas.release import OldRelease

ERRORS = [
    (OldRelease("a CommitNote/1 record"), "use release 0.1.0 for this run"),
    (CheckpointError("cannot write checkpoint 1.2"), "cannot write checkpoint 1.2"),
    (MissingBatch("global batch 7 is missing"), "global batch 7 is missing"),
    (CannotTrain("5 consecutive batches"), "5 consecutive batches"),
    (CannotGenerate("rollout.gpus has 4"), "rollout.gpus has 4"),
]


def run_role(monkeypatch: pytest.MonkeyPatch, folder: Path, error: Exception) -> int:
    """The exit code of a role whose process raises `error`."""

    def run_process(*_: object) -> None:
        raise error

    monkeypatch.setattr(configs, "load_config", lambda path: None)
    monkeypatch.setattr(role_logging, "configure_logging", lambda: None)
    monkeypatch.setattr(roles, "run_process", run_process)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    return zygote._run({"config": str(folder), "start": "score", "roles": [["score", 0]]})


@pytest.mark.parametrize(("error", "message"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_role_is_not_restarted_after_a_permanent_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    assert run_role(monkeypatch, tmp_path, error) == roles.CANNOT_RUN
    assert message in capsys.readouterr().err


def test_trainer_is_not_restarted_after_its_learner_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(*build_demo_model(DemoModelConfig(layers=1)), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_types": ["sliding_attention"]}))
    with pytest.raises(CannotTrain) as refusal:
        RankTraining(TrainingConfig(optimizer_steps=1), tmp_path / "model", tmp_path / "checkpoints", 1)
    assert run_role(monkeypatch, tmp_path, refusal.value) == roles.CANNOT_RUN
    assert "the trainer cannot start: the model in" in (found := capsys.readouterr().err)
    assert "only full attention can be trained" in found


@pytest.mark.parametrize(
    ("name", "says"), [("none.py:Own", "there is no file"), ("absent.module:Own", "there is no module 'absent'")]
)
def test_trainer_is_not_restarted_without_its_learner(tmp_path: Path, name: str, says: str) -> None:
    config = TrainingConfig(learner=LearnerConfig(name=name))
    with pytest.raises(CannotTrain, match=rf"the trainer cannot start: trainer\.learner\.name: '{name}' .*: {says}"):
        RankTraining(config, tmp_path / "model", tmp_path / "checkpoints", 1)


def test_memory_beyond_the_limit_of_a_cgroup_is_permanent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    save_folder(*build_demo_model(DemoModelConfig(layers=1)), model)
    monkeypatch.setattr(memory, "_limits", lambda root: [(100_000, 99_000)])
    with pytest.raises(CannotTrain, match=r"cpu has 1\.0 KiB free.* only 97\.7 KiB in all"):
        check_device_memory(model, TrainingConfig(), "cpu")
    with pytest.raises(CannotGenerate, match=r"this machine has 1\.0 KiB free"):
        choose_slots(RolloutConfig(), model, torch.device("cpu"))


@pytest.mark.parametrize(("cause", "restarted"), [(TimeoutError("no answer"), True), (OSError(ENOSPC, "full"), False)])
def test_role_is_restarted_if_its_storage_did_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: OSError, restarted: bool
) -> None:
    def read() -> None:
        raise CheckpointError("cannot be listed") from cause

    with pytest.raises(CheckpointError) as found:
        persist(read, 2, wait=lambda seconds: False)
    if not restarted:
        assert run_role(monkeypatch, tmp_path, found.value) == roles.CANNOT_RUN
        return
    with pytest.raises(CheckpointsUnavailable):
        run_role(monkeypatch, tmp_path, found.value)
