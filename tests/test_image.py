"""The image: built from what the Dockerfile names, without root; built and tried where a container engine runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import tomli_w
from end_to_end.small_runs import EMULATED

from infra.bill_of_materials import packages

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
ENGINE = next((name for name in ("docker", "podman") if shutil.which(name)), None)


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of `make` here do not get the ARGS of a `make test` that runs them."""
    for name in ("ARGS", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)


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
    assert not set(copied) - set(kept), ".dockerignore leaves them out"
    assert all((ROOT / name).exists() for name in copied)
    assert not set("*?[") & set("".join(copied)), "podman refuses a pattern of which nothing exists"


def install_packages(folder: Path, **arguments: str) -> list[str]:
    """Execute the RUN instruction that installs the packages, in `folder`: the command lines of pip and uv, of which
    neither is started.
    """
    (script,) = (line for line in instructions("RUN") if "--require-hashes" in line)
    programs, log = folder / "bin", folder / "log"
    programs.mkdir()
    for name in ("python", "uv"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
        (programs / name).chmod(0o755)
    for name in ("requirements.txt", "requirements-uv.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "wheelhouse").mkdir(exist_ok=True)
    given = {"EXTRAS": "", "TORCH": "", "EXTRA_INDEX": "", **arguments, "PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", script.replace("/opt/laminar", str(folder))], cwd=folder, env=given, check=True)
    return [line for line in log.read_text().splitlines() if "install" in line]


def test_image_for_cpus_has_the_pinned_torch() -> None:
    words = subprocess.run(["make", "-n", "image-cpu"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (pinned,) = (each.version for each in packages(ROOT / "requirements.txt") if each.name == "torch")
    assert f"TORCH=torch=={pinned}+cpu" in words
    assert "EXTRA_INDEX=https://download.pytorch.org/whl/cpu" in words


def test_image_for_cpus_has_the_given_torch(tmp_path: Path) -> None:
    torch = "torch==2.15.0+cpu"
    _, uv = install_packages(tmp_path, TORCH=torch, EXTRA_INDEX="https://cpu", EXTRAS="vllm")
    assert uv.endswith(f"setuptools {torch}")
    assert "--extra-index-url https://cpu --extra vllm" in uv
    given = {each.name: each for each in packages(ROOT / "requirements.txt")}
    left = {each.name: each for each in packages(tmp_path / "requirements.txt")}
    assert left.pop("torch").version == "2.15.0+cpu"
    assert left == {name: each for name, each in given.items() if name != "torch"}


@pytest.mark.parametrize("name", ["", "flink"])
def test_image_has_the_jars_that_are_wanted(tmp_path: Path, name: str) -> None:
    (script,) = (line for line in instructions("RUN") if "JARS" in line)
    (tmp_path / "wheelhouse" / "maven" / "org").mkdir(parents=True)
    log, python = tmp_path / "log", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$XDG_CACHE_HOME $M2_REPO $*" >> {log}\n')
    python.chmod(0o755)
    given = {"JARS": name, "PATH": "/usr/bin:/bin"}
    subprocess.run(["sh", "-c", script.replace("/opt/laminar", str(tmp_path))], cwd=tmp_path, env=given, check=True)
    assert log.exists() == bool(name)
    assert (tmp_path / "maven" / "org").is_dir(), "a repository that was downloaded elsewhere"
    if name:
        code = log.read_text().split(" -c ")[1]
        assert code == "from infra.runners.flink_jars import JARS; JARS.class_path(print)\n"
        (variables,) = (line for line in instructions("ENV") if "LAMINAR_JARS" in line)
        assert f"LAMINAR_JARS={log.read_text().split()[0]}/laminar" in variables.replace("/opt/laminar", str(tmp_path))


@pytest.mark.parametrize("wheelhouse", [True, False])
def test_image_is_built_from_the_wheelhouse_if_there_is_one(tmp_path: Path, wheelhouse: bool) -> None:
    (tmp_path / "wheelhouse").mkdir()
    (tmp_path / "wheelhouse" / ("torch.whl" if wheelhouse else ".keep")).touch()
    installed = install_packages(tmp_path)
    assert len(installed) == 2
    assert all(("--no-index --find-links wheelhouse" in line) is wheelhouse for line in installed)
    assert (tmp_path / "requirements.txt").read_text() == (ROOT / "requirements.txt").read_text()


def test_image_has_its_bill_of_materials(tmp_path: Path) -> None:
    (build,) = (line for line in instructions("RUN") if "bill_of_materials" in line)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    (tmp_path / "opt").mkdir()
    script = build.replace("/opt/laminar/bin/python", f"PYTHONPATH={ROOT} {sys.executable}")
    script = script.replace("/opt/laminar", str(tmp_path / "opt"))
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, check=True)
    parts = json.loads((tmp_path / "opt" / "sbom.cdx.json").read_text())["components"]
    python = {each["name"]: each["version"] for each in parts if each["purl"].startswith("pkg:pypi/")}
    here = {re.sub("[-_.]+", "-", each.name).lower(): each.version for each in distributions()}
    assert python == {name: version for name, version in here.items() if name != "laminar-rl"}
    notice = (tmp_path / "opt" / "NOTICE").read_text()
    assert all(f"  {name} {version}: " in notice for name, version in python.items())


STAND_IN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
with open("{log}", "a") as log:
    print(*words, file=log)
if words.pop(0) == "run":
    mounts = [words[at + 1].split(":")[:2] for at, word in enumerate(words) if word == "-v"]
    command = words[words.index("{image}") + 1 :]
    for here, there in mounts:
        command = [word.replace(there, here) for word in command]
    os.chdir("{folder}")
    sys.exit(subprocess.call(command))
"""
"""An engine that builds nothing, and runs commands on this machine."""


def try_image(target: str, engine: str, folder: Path) -> None:
    """Build the image of make's `target` with `engine`, and try commands in it, the last one a whole short run."""
    image = f"laminar:{target}-test"
    subprocess.run(["make", target, f"IMAGE={image}", f"ENGINE={engine}"], cwd=ROOT, check=True, timeout=2400)
    as_a_pod = ["--read-only", "--tmpfs", "/tmp"]
    file = folder / "emulated.toml"
    file.write_text(tomli_w.dumps(EMULATED))
    mounted = ["-v", f"{file}:/etc/laminar/run.toml:ro"]
    for options, command, shown in (
        (as_a_pod, ["laminar", "--version"], "laminar "),
        (as_a_pod, ["laminar", "doctor"], "laminar run can work here"),
        (mounted, ["laminar", "run", "/etc/laminar/run.toml"], "The audit passed"),
    ):
        words = [engine, "run", "--rm", *options, image, *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert shown in done.stdout + done.stderr


def test_variants_are_built_by_the_engine_that_is_named() -> None:
    for target in ("image", "image-cpu"):
        command = ["make", "-n", target, "ENGINE=podman"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert shown.startswith("podman build -t laminar:latest"), target


@pytest.mark.slow
def test_commands_that_try_the_image_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, in place of a container."""
    engine, log = tmp_path / "engine", tmp_path / "log"
    engine.write_text(STAND_IN.format(python=sys.executable, log=log, image="laminar:image-cpu-test", folder=tmp_path))
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    try_image("image-cpu", str(engine), tmp_path)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["build", "run", "run", "run"]


def _engine_runs() -> bool:
    return ENGINE is not None and subprocess.run([ENGINE, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(not _engine_runs(), reason="no container engine runs here")
@pytest.mark.parametrize("target", ["image", "image-cpu"])
def test_image_builds_and_runs(target: str, tmp_path: Path) -> None:
    assert ENGINE is not None
    try_image(target, ENGINE, tmp_path)
