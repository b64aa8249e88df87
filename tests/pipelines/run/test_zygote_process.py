"""The temporary folder of a run's roles."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pipelines.run.zygote_process import temporary_folder


def test_temporary_folder_of_a_resumed_run_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = Path(temporary_folder(Path("runs/first/logs")))
    (first / "beam-pipeline-temp").mkdir()
    assert Path(temporary_folder(Path("runs/first/logs"))) == first
    assert list(first.iterdir()) == []
    assert first.stat().st_mode & 0o777 == 0o700
    other = Path(temporary_folder(Path("runs/second/logs")))
    assert other != first


def test_temporary_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = Path(temporary_folder(Path("runs/first/logs")))
    foreign.rmdir()
    (tmp_path / "elsewhere").mkdir()
    foreign.symlink_to(tmp_path / "elsewhere")
    found = Path(temporary_folder(Path("runs/first/logs")))
    assert found not in (foreign, tmp_path / "elsewhere")
    assert found.is_dir()
