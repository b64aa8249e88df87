"""The memory that a process may use follows the limits of its cgroups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infra.memory import usable_memory

MB = 1_000_000


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=600 * MB, total=1000 * MB))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def cgroup(most: object, current: int, cache: int = 0) -> dict[str, str]:
    """The files of a cgroup v2, a quarter of whose page cache is active."""
    stat = f"anon 7\ninactive_file {cache - cache // 4}\nactive_file {cache // 4}"
    return {"memory.max": str(most), "memory.current": str(current), "memory.stat": stat}


def test_memory_is_the_machines_without_cgroups(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) == (600 * MB, 1000 * MB)
    write(tmp_path, {"proc/self/cgroup": "0::/pod/own"})
    write(tmp_path / "sys/fs/cgroup/pod/own", cgroup("max", 5 * MB))
    assert usable_memory(tmp_path) == (600 * MB, 1000 * MB)
    write(tmp_path / "sys/fs/cgroup/pod/own", cgroup(2000 * MB, 5 * MB))
    assert usable_memory(tmp_path) == (600 * MB, 1000 * MB)


@pytest.mark.parametrize("at", ["pod/own", "pod", ""])
def test_memory_is_what_a_cgroup_or_one_above_it_leaves(tmp_path: Path, at: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "1:name=systemd:/x\n0::/pod/own"})
    write(tmp_path / "sys/fs/cgroup/pod/own", cgroup("max", 0))
    write(tmp_path / "sys/fs/cgroup" / at, cgroup(200 * MB, 150 * MB, cache=40 * MB))
    assert usable_memory(tmp_path) == (90 * MB, 200 * MB)
    write(tmp_path / "sys/fs/cgroup" / at, cgroup(200 * MB, 201 * MB))
    assert usable_memory(tmp_path) == (0, 200 * MB)


@pytest.mark.parametrize("path", ["/docker/own", "/../other"])
def test_memory_of_a_container_is_limited_at_the_mount(tmp_path: Path, path: str) -> None:
    write(tmp_path, {"proc/self/cgroup": f"0::{path}"})
    write(tmp_path / "sys/fs/cgroup", cgroup(200 * MB, 50 * MB))
    assert usable_memory(tmp_path) == (150 * MB, 200 * MB)


def test_memory_is_what_a_cgroup_of_version_1_leaves(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/own\n0::/"})
    stat = f"inactive_file 1\ntotal_inactive_file {10 * MB}\ntotal_active_file {5 * MB}"
    own = {"memory.limit_in_bytes": f"{200 * MB}", "memory.usage_in_bytes": f"{50 * MB}", "memory.stat": stat}
    write(tmp_path / "sys/fs/cgroup/memory/own", own)
    unlimited = {"memory.limit_in_bytes": str((1 << 63) - 4096), "memory.usage_in_bytes": "5", "memory.stat": stat}
    write(tmp_path / "sys/fs/cgroup/memory", unlimited)
    assert usable_memory(tmp_path) == (165 * MB, 200 * MB)
