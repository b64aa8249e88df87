"""Starts this Python as an ordinary user, also if its files are below a folder that only root may enter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from infra.sandbox import linux

ROOT = Path(__file__).parents[3]
ORDINARY = 65534


def run_as(user: int, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `command` with this Python as `user`: this process's own user or, if that is root, an ordinary one."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TMPDIR", None)
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd="/",
        text=True,
        capture_output=True,
        preexec_fn=None if user == os.getuid() else lambda: _become(user),
        **options,
    )


def _become(user: int) -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    for path in (Path(sys.base_prefix), Path(sys.prefix), ROOT):
        if (closed := _closed(path)) is not None:
            _show_only(path, closed)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _closed(path: Path) -> Path | None:
    """The first parent folder of `path` that other users may not enter."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)


def _show_only(path: Path, closed: Path) -> None:
    """In this mount namespace only, replace `closed` by an empty folder that contains only the way to `path`."""
    kept = os.open(path, os.O_PATH)
    linux.mount("tmpfs", str(closed), "tmpfs", 0, "size=64k,mode=0755")
    path.mkdir(parents=True)
    linux.mount(f"/proc/self/fd/{kept}", str(path), "", linux.MS_BIND)
    os.close(kept)
