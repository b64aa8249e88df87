"""Limits of a process's memory, enforced by the kernel."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_more_memory_than(more: int) -> Iterator[None]:
    """Limit this process to `more` bytes of private memory beyond the present; read-only mapped files do not count."""
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(match[1]) * 1024 + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
