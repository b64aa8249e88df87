"""A session that leaves files in the temporary directory fails and names them and the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from temporary_folder import CACHES, REMOVED_LATER, unexpected_in

HERE = Path(__file__).parent


@pytest.mark.parametrize(("leaves", "workers"), [(True, 2), (False, 0)])
def test_session_fails_and_names_the_test_if_files_are_left(tmp_path: Path, leaves: bool, workers: int) -> None:
    shutil.copy(HERE / "temporary_folder.py", tmp_path)
    (tmp_path / "conftest.py").write_text(
        "import temporary_folder\ndef pytest_configure(config): temporary_folder.register(config)\n"
    )
    remove = "" if leaves else "\n    os.rmdir(folder)"
    (tmp_path / "test_it.py").write_text(
        f"import os, tempfile\ndef test_it(tmp_path):\n    folder = tempfile.mkdtemp(prefix='left-'){remove}\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(["-n", "2"] if workers else [])]
    done = subprocess.run(
        words, cwd=tmp_path, env={**environment, "TMPDIR": str(elsewhere)}, capture_output=True, text=True, check=False
    )
    assert ("1 passed" in done.stdout, done.returncode) == (True, 1 if leaves else 0), done.stdout
    assert ("left-" in done.stdout, "test_it.py::test_it" in done.stdout) == (leaves, leaves), done.stdout
    assert [path.name for path in elsewhere.iterdir()] == ["pytest-of-root"] or os.geteuid()


def test_killed_programs_may_leave_what_the_next_start_removes(tmp_path: Path) -> None:
    names = ("laminar-pipeline-a", "laminar-run-b", "beam-pipeline-tempc", "torchinductor_root")
    for name in names:
        (tmp_path / name).mkdir()
    assert unexpected_in(tmp_path, (*CACHES, *REMOVED_LATER)) == [tmp_path / names[2]]
    assert [path.name for path in unexpected_in(tmp_path)] == sorted(names[:3])
