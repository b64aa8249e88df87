"""The file names of a weight store. Files with other names do not belong to it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from schemas.records import PolicyVersion
from schemas.topics import run_prefix

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "laminar-"
STORES = f"{_PREFIX}*"
"""Glob pattern of the names of stores in shared memory."""

OWNER = "owner.json"
"""The process that created the store: for people, and to find stale stores."""
CLUSTER = "cluster"
"""A symbolic link whose target is the id of the Kafka cluster of the store's run: created at once, with its content."""
USERS = "users.lock"
"""Every process that has the store open holds a shared lock on it."""
WRITER = "writer.lock"
"""The process that writes to the store holds an exclusive lock on it."""
SPARE = "spare.partial"
"""Memory reserved for the next version."""

WEIGHTS = ".safetensors"
SIDECAR = ".json"
PARTIAL = ".partial"
DELTA = ".delta"
LIVE = "live.json"
"""The versions of live trajectories."""

_VERSION = r"[0-9]{1,18}\.[0-9]{1,18}"
_WEIGHTS = re.compile(rf"({_VERSION})\.safetensors")
_FILES = re.compile(
    rf"{_VERSION}\.(safetensors|json|partial|delta)|{OWNER}|{CLUSTER}|{LIVE}({PARTIAL})?|{USERS}|{WRITER}|{SPARE}"
)


def default_root(run: str, base: Path = SHARED_MEMORY) -> Path:
    """The folder for the weights of `run`, in shared memory. Raises ValueError for a bad run name."""
    run_prefix(run)
    return base / f"{_PREFIX}{run}"


def weight_file(version: PolicyVersion) -> str:
    """The file name of a version; also `WeightVersion.file`."""
    return f"{version}{WEIGHTS}"


@lru_cache(maxsize=1024)
def version_of(name: str) -> PolicyVersion | None:
    """The version whose weight file is called `name`; None for other files."""
    match = _WEIGHTS.fullmatch(name)
    return PolicyVersion.parse(match[1]) if match else None


def is_store_file(name: str) -> bool:
    """Whether a file of this name belongs to a store."""
    return _FILES.fullmatch(name) is not None


def orphans(root: Path) -> list[Path]:
    """Files left by a killed writer: partial versions, its spare memory, and seals and deltas without a version.

    A partial list of live versions is not one: another thread or process may be writing it.
    """
    names = {path.name for path in root.iterdir()} - {f"{LIVE}{PARTIAL}"}
    left = [name for name in names if is_store_file(name) and name.endswith(PARTIAL)]
    for suffix in (SIDECAR, DELTA):
        beside = (name for name in names if is_store_file(name) and name.endswith(suffix) and name[0].isdigit())
        left += [name for name in beside if f"{name.removesuffix(suffix)}{WEIGHTS}" not in names]
    return [root / name for name in sorted(left)]
