"""Files are private to their owner unless a umask is configured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.files import UMASK_VARIABLE, keep_files_private, write_private


@pytest.fixture(autouse=True)
def same_umask_after() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes_after(code: str, folder: Path, umask: str | None = None) -> list[int]:
    """The modes of the files and folders that `code` and its child process create."""
    environment = {name: value for name, value in os.environ.items() if name != UMASK_VARIABLE}
    environment |= {} if umask is None else {UMASK_VARIABLE: umask}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, timeout=60)
    return [path.stat().st_mode & 0o777 for path in sorted(folder.iterdir())]


WRITES = """
import os, subprocess
from infra.files import keep_files_private
keep_files_private()
open("a", "w").close(); os.mkdir("b"); subprocess.run(["touch", "c"], check=True)
"""


@pytest.mark.parametrize(
    ("umask", "modes"), [(None, [0o600, 0o700, 0o600]), ("027", [0o640, 0o750, 0o640]), ("022", [0o644, 0o755, 0o644])]
)
def test_files_are_private_unless_a_umask_is_set(
    umask: str | None, modes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert modes_after(WRITES, tmp_path, umask) == modes


@pytest.mark.parametrize("wanted", ["rw", "9", "-1", "7777"])
def test_keep_files_private_raises_for_an_invalid_umask(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UMASK_VARIABLE, wanted)
    with pytest.raises(ValueError, match="LAMINAR_UMASK must be an octal umask"):
        keep_files_private()


def test_write_private_ignores_the_umask(tmp_path: Path) -> None:
    os.umask(0)
    write_private(tmp_path / "secret", "s")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
