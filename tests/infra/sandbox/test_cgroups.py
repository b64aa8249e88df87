"""Cgroups: a delegated cgroup is used, or rejected with the reason."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.sandbox import running
from infra.sandbox.cgroups import VARIABLE, ProgramCgroup, program_cgroup
from infra.sandbox.run import Limits, SandboxUnavailable, run_python

pytestmark = pytest.mark.usefixtures("confined")


THREADS = (
    "from threading import *\nmade = 0\ntry:\n"
    "  while True: Thread(target=Event().wait, daemon=True).start(); made += 1\n"
    "except RuntimeError: print(made)"
)


@pytest.fixture
def hierarchy() -> Iterator[Path]:
    """A folder of this machine's cgroup v2 in which this user can create cgroups."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    mounted = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if mounted is None or not os.access(mounted, os.W_OK):
        pytest.skip("no cgroup v2 here that this user may change")
    made = mounted / f"laminar-test-{os.getpid()}"
    made.mkdir()
    yield made
    assert [each for each in made.iterdir() if each.is_dir()] == []
    made.rmdir()


def test_program_cgroup_is_none_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert program_cgroup(1 << 20, 8) is None


def test_run_python_rejects_a_folder_that_is_not_a_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxUnavailable, match=f"{VARIABLE}={tmp_path} is not a cgroup v2"):
        run_python("")
    assert set(os.listdir("/proc/self/fd")) == before


def test_run_python_rejects_a_cgroup_without_controllers(monkeypatch: pytest.MonkeyPatch, hierarchy: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(hierarchy))
    with pytest.raises(SandboxUnavailable, match=r"does not delegate memory and pids: write '\+memory \+pids' to its"):
        run_python("")


def test_program_runs_in_a_cgroup_that_is_removed(monkeypatch: pytest.MonkeyPatch, hierarchy: Path) -> None:
    """Without limits, which need controllers."""
    monkeypatch.setattr(running, "program_cgroup", lambda memory_bytes, threads: ProgramCgroup(hierarchy, {}))
    found: list[str] = []
    record = running.Running._record

    def look(self: running.Running, message: dict[str, Any]) -> None:
        record(self, message)
        if self._ready and self._pid is not None and not found:  # two processes report these, in any order
            found.append(Path(f"/proc/{self._pid}/cgroup").read_text())

    write = running.Running._write_input

    def write_later(self: running.Running, key: selectors.SelectorKey) -> None:
        """The program gets its input, and so ends, once it has been looked at."""
        if found or bytes(key.data) != b"1\n":
            write(self, key)

    monkeypatch.setattr(running.Running, "_record", look)
    monkeypatch.setattr(running.Running, "_write_input", write_later)
    assert run_python("print(input())", b"1\n", limits=Limits(seconds=30.0)).output == b"1\n"
    assert f"0::/{hierarchy.name}/laminar-{os.getpid()}-" in found[0]
    assert run_python("while True: pass", limits=Limits(seconds=0.1)).ended == "time"


@contextmanager
def below_own_cgroup(controller: str) -> Iterator[Path]:
    """A cgroup with `controller` of this machine's hierarchies of version 1, below this process's own one."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    named = next((path for _, names, path in own if controller in names.split(",")), None)
    folder = Path(f"/sys/fs/cgroup/{controller}{named}")
    if named is None or not (folder / "cgroup.procs").exists() or os.geteuid():
        pytest.skip(f"no cgroup v1 with {controller} here that this user may change")
    made = folder / f"laminar-test-{os.getpid()}"
    made.mkdir()
    try:
        yield made
        assert [each for each in made.iterdir() if each.is_dir()] == []
    finally:
        made.rmdir()


def test_kernel_enforces_the_threads_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program joins its cgroup in time: with the controllers of version 1, which count as those of version 2."""
    with below_own_cgroup("pids") as parent:
        limits = {"pids.max": 11}
        monkeypatch.setattr(running, "program_cgroup", lambda memory_bytes, threads: ProgramCgroup(parent, limits))
        assert run_python(THREADS, limits=Limits(seconds=30.0, threads=1000)).output == b"9\n"


def test_kernel_enforces_the_memory_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with below_own_cgroup("memory") as parent:
        limits = {"memory.limit_in_bytes": 96 << 20}
        monkeypatch.setattr(running, "program_cgroup", lambda memory_bytes, threads: ProgramCgroup(parent, limits))
        monkeypatch.setattr(running, "_rlimits", lambda limits, namespaces: {"CORE": 1})
        assert run_python("print(1)", limits=Limits(seconds=30.0)).output == b"1\n"
        assert run_python("x = b'x' * (1 << 30)", limits=Limits(seconds=30.0)).ended == "killed"


def test_cgroup_limits_memory_and_threads(monkeypatch: pytest.MonkeyPatch, hierarchy: Path) -> None:
    controllers = set((hierarchy / "cgroup.controllers").read_text().split())
    if missing := {"memory", "pids"} - controllers:
        pytest.skip(f"cgroup v2 has no controller for {' and '.join(sorted(missing))} here")
    (hierarchy / "cgroup.subtree_control").write_text("+memory +pids")
    monkeypatch.setenv(VARIABLE, str(hierarchy))
    assert run_python(THREADS, limits=Limits(seconds=30.0, threads=10)).output == b"9\n"
    monkeypatch.setattr(running, "_rlimits", lambda limits, namespaces: {"CORE": 1})
    ran = run_python("x = b'x' * (1 << 30)", limits=Limits(seconds=30.0, memory_mb=64))
    assert ran.ended == "killed"
