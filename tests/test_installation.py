"""The package as a user installs it: wheel and sdist, tried from outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = sysconfig.get_paths()["purelib"]
UV = Path(sys.executable).with_name("uv")


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TMPDIR"] = str(cwd)  # uv leaves its lock files there
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    command = [UV, "build", "--offline", "--quiet", "--no-build-isolation", *kinds, "--python", sys.executable]
    run(*command, "--out-dir", out, source, cwd=out)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of the files that git knows."""
    folder = tmp_path_factory.mktemp("built")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    copy = folder / "checkout"
    for name in filter(None, map(os.fsdecode, files)):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build(copy, folder, "--wheel", "--sdist")
    return folder


@pytest.fixture(scope="module")
def laminar(built: Path) -> Path:
    """The command of a new environment with the wheel, whose dependencies are those of this one."""
    environment = built / "environment"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=built)
    (wheel,) = built.glob("*.whl")
    python = environment / "bin" / "python"
    run(UV, "pip", "install", "--offline", "--quiet", "--no-deps", "--python", python, wheel, cwd=built)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(SITE)
    return environment / "bin" / "laminar"


def test_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    build(sdist, tmp_path, "--wheel")
    names = [set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist()) for folder in (built, tmp_path)]
    assert names[0] == names[1]
    assert {f"infra/jars/kafka-4.3.1.{kind}" for kind in ("sha256", "checkpoint")} <= names[0]
    assert not [name for name in names[0] if name.startswith(("tests/", "benchmarks/"))]


def test_installed_command_runs_outside_the_checkout(laminar: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(laminar, "--version", cwd=tmp_path) == f"laminar {version}\n"
    assert json.loads(run(laminar, "config", "--explain", "run.seed", "--json", cwd=tmp_path))[0]["default"] == "0"
    program = "import pipelines.cli.main as m; print(m.__file__)"
    assert str(laminar.parents[1]) in run(laminar.with_name("python"), "-c", program, cwd=tmp_path)


def test_installed_command_writes_deployment_files(laminar: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text((ROOT / "examples" / "deployed.toml").read_text())
    run(laminar, "deploy", "run.toml", "files", cwd=tmp_path)
    assert (tmp_path / "files" / "compose.yaml").exists()
