"""A role that reads a record of release 0.1.0 ends with CANNOT_RUN, so it is not restarted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipelines import config as configs
from pipelines import roles
from pipelines.run import zygote
from schemas.release import OldRelease


def test_role_cannot_run_on_topics_of_old_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_process(*_: object) -> None:
        raise OldRelease("a CommitNote/1 record")

    monkeypatch.setattr(configs, "load_config", lambda path: None)
    monkeypatch.setattr(roles, "configure_logging", lambda: None)
    monkeypatch.setattr(roles, "run_process", run_process)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    command = {"config": str(tmp_path), "start": "score", "roles": [["score", 0]]}
    assert zygote._run(command) == roles.CANNOT_RUN
    assert "use release 0.1.0 for this run" in capsys.readouterr().err
