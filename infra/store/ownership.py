"""Who uses a store, which stores nobody uses any more, and how one is removed.

Every process that has a store open shares a lock that ends with it, so a store that a killed run left behind is one
whose lock can be had. Process ids decide nothing: they are reused, and mean something else in another container.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from infra.store import locks, names
from infra.store.errors import StoreBusy, StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreOwner:
    """The process that found a store unused, and opened it. `started` is its start in Unix seconds."""

    pid: int
    started: float
    host: str
    opened_at: float


@dataclass(frozen=True)
class StaleStore:
    """A store that no process uses. `bytes` is what it takes up, `owner` who had it first (None: unknown)."""

    root: Path
    bytes: int
    owner: StoreOwner | None


def choose_store_folder(run: str, fallback: Path, needed: int = 0, base: Path = names.SHARED_MEMORY) -> Path:
    """The folder for the weights of `run` on this machine: in shared memory, else `fallback`/weights, saying so.

    Shared memory must be there, writable and, taken whole, hold `needed` bytes: what is free now is not asked, so that
    two processes cannot come to two answers. Still, ask once a machine, and tell every process the folder. Raises
    ValueError for a bad run name.
    """
    root = names.default_root(run, base)
    try:
        size = os.statvfs(base).f_frsize * os.statvfs(base).f_blocks
        problem = f"has only {size} bytes of the {needed} needed" if size < needed else ""
        if not os.access(base, os.W_OK | os.X_OK):
            problem = "is not writable"
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
    if not problem:
        return root
    log.warning("%s %s: weights go to %s, which is slower", base, problem, fallback / "weights")
    return fallback / "weights"


def open_folder(root: Path) -> locks.Lock:
    """Make `root` a store if it is none yet; a share in its lock. Raises StoreError for another user's folder."""
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            if (user := root.lstat().st_uid) != os.geteuid():  # anybody may make folders in shared memory
                raise StoreError(f"{root} belongs to user id {user}: choose another run name or folder")
            alone = locks.try_lock_exclusive(root / names.USERS, os.O_RDWR | os.O_CREAT)
            if alone is not None:
                _write_owner(root)
                alone.release()
            return locks.lock_shared(root / names.USERS)
        except FileNotFoundError:  # removed by another process meanwhile
            continue


def stale_stores(base: Path = names.SHARED_MEMORY) -> list[StaleStore]:
    """The stores under `base` that no process uses, sorted by name. Those of other users are passed over."""
    found = []
    for root in sorted(base.glob(names.STORES)):
        try:
            lock = locks.try_lock_exclusive(root / names.USERS)
            if lock is not None:
                found.append(StaleStore(root, _bytes_in(root), _read_owner(root)))
                lock.release()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
    return found


def remove_store(root: Path, *, in_use: bool = False) -> None:
    """Remove the store in `root` and all it holds; nothing if there is none.

    Raises StoreBusy while a process has it open, unless `in_use` (who has it open then finds its versions gone), and
    StoreError, having removed what is the store's, if the folder holds anything else.
    """
    try:
        lock = locks.try_lock_exclusive(root / names.USERS)
    except FileNotFoundError:
        return
    if lock is None and not in_use:
        raise StoreBusy(f"{root} is in use by another process")
    try:
        ours = [entry.name for entry in os.scandir(root) if names.is_store_file(entry.name)]
        for name in sorted(ours, key=lambda name: name == names.USERS):  # the lock last: it guards the rest
            (root / name).unlink(missing_ok=True)
        left = sorted(os.listdir(root))
        if left:
            raise StoreError(f"{root} also holds {', '.join(left[:5])}, which is no store's: remove it yourself")
        root.rmdir()
    finally:
        if lock is not None:
            lock.release()


def _write_owner(root: Path) -> None:
    owner = StoreOwner(os.getpid(), psutil.Process().create_time(), os.uname().nodename, time.time())
    (root / names.OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")


def _read_owner(root: Path) -> StoreOwner | None:
    try:
        return StoreOwner(**json.loads((root / names.OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _bytes_in(root: Path) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(root))
