"""A file system of a few kilobytes, for tests with a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Create `folder` and mount a file system of `kilobytes` on it; skips the test without the permission to mount."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can only be mounted as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free on the disk of `folder`."""
    with (folder / "filler").open("wb", buffering=0) as out:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while out.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
