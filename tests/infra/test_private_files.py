"""Files are private to their owner unless a umask is configured; secrets always. A new folder appears whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.files import UMASK_VARIABLE, create_secret, keep_files_private, new_folder, read_secret, write_private


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


def test_secret_is_created_once_by_whoever_is_first_and_private(tmp_path: Path) -> None:
    os.umask(0)
    file = tmp_path / "run" / "secret"

    def create(_: int) -> str:
        create_secret(file)
        return read_secret(file)

    with ThreadPoolExecutor(16) as threads:
        (secret,) = set(threads.map(create, range(64)))
    assert len(secret) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\nsecond-line-is-not-read\n", "has no secret in its first line"),
        (b"fifteen-letters\n", "has 15 characters, it must have at least 16: create one with `openssl rand"),
        (b"\xff" * 20, "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_read_secret_rejects_an_invalid_file(content: bytes | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize("place", [".", "inner/..", "..", "full"])
def test_new_folder_refuses_one_that_exists(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = tmp_path / "outer"
    (present / "full").mkdir(parents=True)
    (present / "full" / "file").touch()
    monkeypatch.chdir(present)
    with pytest.raises(FileExistsError, match="exists already: choose another folder"), new_folder(Path(place)):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["outer", "full", "file"]


@pytest.mark.parametrize("place", ["new", "empty/../new", "empty"])
def test_new_folder_is_made_from_the_present_one(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with new_folder(Path(place)) as unfinished:
        (unfinished / "file").touch()
    assert Path(place, "file").exists()


def test_new_folder_refuses_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is empty: the user would be left in a removed folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match="exists already"), new_folder(Path()):
        pass


def test_files_of_users_have_no_encoding_of_the_locale(tmp_path: Path) -> None:
    code = """
import sys, warnings
from pathlib import Path
from infra.files import write_private
from infra.kafka.java_properties import expand_references
from pipelines.config import read_config
warnings.simplefilter("error", EncodingWarning)
write_private(Path("a.toml"), "run.name = 'a'  # für dich\\n")
read_config(Path("a.toml"))
expand_references("${file:a.toml}")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-X", "warn_default_encoding", "-c", code]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
