"""A role whose next start would fail again ends with CANNOT_RUN, so it is not restarted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from operators.trainer.assembly import CannotTrain, MissingBatch
from operators.trainer.persist import CheckpointError
from pipelines import config as configs
from pipelines import roles
from pipelines.run import zygote
from schemas.release import OldRelease

ERRORS = [
    (OldRelease("a CommitNote/1 record"), "use release 0.1.0 for this run"),
    (CheckpointError("cannot write checkpoint 1.2"), "cannot write checkpoint 1.2"),
    (MissingBatch("global batch 7 is missing"), "global batch 7 is missing"),
    (CannotTrain("5 consecutive batches"), "5 consecutive batches"),
]


@pytest.mark.parametrize(("error", "message"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_role_is_not_restarted_after_a_permanent_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    def run_process(*_: object) -> None:
        raise error

    monkeypatch.setattr(configs, "load_config", lambda path: None)
    monkeypatch.setattr(roles, "configure_logging", lambda: None)
    monkeypatch.setattr(roles, "run_process", run_process)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    command = {"config": str(tmp_path), "start": "score", "roles": [["score", 0]]}
    assert zygote._run(command) == roles.CANNOT_RUN
    assert message in capsys.readouterr().err
