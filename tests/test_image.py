"""The image: built from what the Dockerfile names, without root; built and tried where a container engine runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
ENGINE = next((name for name in ("docker", "podman") if shutil.which(name)), None)


def instructions(name: str) -> list[str]:
    """The arguments of every instruction `name`."""
    return [line.removeprefix(f"{name} ") for line in LINES if line.startswith(f"{name} ")]


def test_image_is_based_on_a_variable_and_runs_without_root() -> None:
    assert {line.split()[0] for line in instructions("FROM")} == {"${PYTHON_IMAGE}"}
    (user,) = instructions("USER")
    assert user == "10001:10001"
    assert not instructions("ADD")


def test_image_context_has_what_the_dockerfile_copies() -> None:
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [word for line in instructions("COPY") if not line.startswith("--from") for word in line.split()[:-1]]
    for name in copied:
        assert any(fnmatch(each, name) for each in kept), f".dockerignore leaves out {name}"
    assert all((ROOT / name).exists() for name in copied if "[" not in name)


def _engine_runs() -> bool:
    return ENGINE is not None and subprocess.run([ENGINE, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.soak
@pytest.mark.skipif(not _engine_runs(), reason="no container engine runs here")
def test_image_builds_and_runs_a_command() -> None:
    assert ENGINE is not None
    subprocess.run([ENGINE, "build", "-t", "laminar:test", str(ROOT)], check=True, timeout=1800)
    command = [ENGINE, "run", "--rm", "--read-only", "--tmpfs", "/tmp", "laminar:test", "laminar", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("laminar ")
