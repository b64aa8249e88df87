"""Temporary folders: those of killed processes are removed at the next start, those of living ones are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.scratch import scratch_folder

PROGRAM = """
import sys
from infra.scratch import scratch_folder
with scratch_folder("laminar-audit-") as folder:
    (folder / "config.toml").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_scratch_folder_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    (tmp_path / "laminar-audit-file").write_text("")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=places) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with scratch_folder("laminar-audit-") as ours:
            assert theirs.parent == ours.parent == tmp_path
            assert theirs.is_dir()
        assert not ours.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert theirs.is_dir()
        with scratch_folder("laminar-audit-"):
            assert not theirs.exists()
    assert {each.name for each in tmp_path.iterdir()} == {"laminar-audit-file"}
