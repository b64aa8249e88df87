"""Ownership of stores: which are in use, which are stale, and how a store is removed.

Every process that has a store open holds a shared lock that ends with the process, so a store is stale if an exclusive
lock can be acquired. Process ids are not used for this: they are reused, and differ between containers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from infra.machine import login_user
from infra.store import locks, names
from infra.store.errors import StoreBusy, StoreError

log = logging.getLogger(__name__)

UNUSED_S = 3600.0
"""Seconds in which a run that is restarted opens its store again."""


@dataclass(frozen=True)
class StoreOwner:
    """The process that opened an unused store, in `folder`. `started` is the process's start in Unix seconds.

    `login` is the id of the user who logged in, also where they became root later; None if it is not known. `run` is
    the folder of the run whose weights these are; empty if it is not known.
    """

    pid: int
    started: float
    host: str
    opened_at: float
    folder: str = ""
    login: int | None = None
    run: str = ""

    def __str__(self) -> str:
        started = f", started in {self.folder}" if self.folder else ""
        return f"process {self.pid} on {self.host}{started}" + (f", of the run in {self.run}" if self.run else "")


@dataclass(frozen=True)
class StoreMarks:
    """Whose a store is: the folder of the run, and the id of its Kafka cluster; empty if they are not known."""

    run: str
    cluster: str

    def write(self, root: Path) -> None:
        """Mark the store `root`, of which nobody else has marked anything."""
        if self.run:
            _write_owner(root, Path(self.run))
        if self.cluster:
            _is_of(root, self.cluster)


@dataclass(frozen=True)
class StaleStore:
    """A store that no process uses: its size in `bytes` and its `owner` (None: unknown)."""

    root: Path
    bytes: int
    owner: StoreOwner | None


def choose_store_folder(run: str, fallback: Path, needed: int = 0, base: Path = names.SHARED_MEMORY) -> Path:
    """Choose the folder for the weights of `run` on this machine: shared memory, or `fallback`/weights with a warning.

    Shared memory must exist, be writable and have a total size of at least `needed` bytes. Free space is ignored, so
    that two processes do not choose differently; still, call this once per machine and pass the folder to every
    process. Raises ValueError for an invalid run name.
    """
    root = names.default_root(run, base)
    try:
        size = os.statvfs(base).f_frsize * os.statvfs(base).f_blocks
        problem = f"has only {size} bytes, {needed} are needed" if size < needed else ""
        if not os.access(base, os.W_OK | os.X_OK):
            problem = "is not writable"
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
    if not problem:
        return root
    log.warning("%s %s: weights are stored in %s, which is slower", base, problem, fallback / "weights")
    return fallback / "weights"


def open_folder(root: Path, run: Path | None = None) -> locks.FileLock:
    """Create the store `root` of the run in folder `run` if necessary, and return a shared lock.

    Without `run` the store keeps the run that it has. Raises StoreError for another user's folder.
    """
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            if (user := root.lstat().st_uid) != os.geteuid():  # any user can create folders in shared memory
                raise StoreError(f"{root} belongs to user id {user}: choose another run name or folder")
            alone = locks.try_lock_exclusive(root / names.USERS, os.O_RDWR | os.O_CREAT)
            if alone is not None:
                _write_owner(root, run)
                alone.release()
            return locks.lock_shared(root / names.USERS)
        except FileNotFoundError:  # removed by another process meanwhile
            continue


def read_marks(root: Path) -> StoreMarks:
    """Whose the store `root` is."""
    owner, mark = _read_owner(root), root / names.CLUSTER
    return StoreMarks("" if owner is None else owner.run, str(mark.readlink()) if mark.is_symlink() else "")


def stores_of(run: Path, base: Path = names.SHARED_MEMORY) -> list[tuple[Path, int]]:
    """The stores under `base` of the run in the folder `run`, which need not exist any more, with their bytes."""
    found = []
    for root in sorted(base.glob(names.STORES)):
        with suppress(FileNotFoundError):  # removed by another process meanwhile
            if root.is_symlink() or root.lstat().st_uid != os.geteuid():
                continue
            owner = _read_owner(root)
            if owner is not None and owner.run and Path(owner.run).resolve() == run.resolve():
                found.append((root, _bytes_in(root)))
    return found


def is_used(root: Path) -> bool:
    """Whether a process has the store `root` open."""
    try:
        lock = locks.try_lock_exclusive(root / names.USERS)
    except FileNotFoundError:
        return False
    if lock is not None:
        lock.release()
    return lock is None


def claim_store(root: Path, cluster: str, run: Path | None = None) -> locks.FileLock:
    """Open the store `root` for the run in folder `run`, of the Kafka cluster with id `cluster`; return a shared lock.

    A run of the same name in another cluster has the same folder: its store is removed if no process uses it. Raises
    StoreError if one does, and for another user's folder.
    """
    while True:
        lock = open_folder(root, run)
        try:
            if _is_of(root, cluster):
                return lock
            lock.release()
            remove_store(root)
        except StoreBusy as error:
            raise StoreError(
                f"{error}, by a run of the same name in another Kafka cluster: choose another run.name, or set "
                "relay.store to another folder"
            ) from error
        except FileNotFoundError:  # removed by another process meanwhile
            lock.release()


def stale_stores(base: Path = names.SHARED_MEMORY) -> list[StaleStore]:
    """The stores under `base` that no process uses, sorted by name; those of other users are skipped.

    Where several people work as root, another user is one who logged in as another user.
    """
    found, login = [], login_user()
    for root in sorted(base.glob(names.STORES)):
        try:
            own = root.stat().st_uid == os.geteuid()
            lock = locks.try_lock_exclusive(root / names.USERS) if own else None
            if lock is not None:
                owner = _read_owner(root)
                if owner is None or login is None or owner.login in (None, login):
                    found.append(StaleStore(root, _bytes_in(root), owner))
                lock.release()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
    return found


def remove_ended_stores(own: Path) -> list[Path]:
    """Remove the stores beside `own` that no process uses, and that have not changed for `UNUSED_S`: their runs have
    ended, or fetch their weights again. Returns their folders.
    """
    removed, now = [], time.time()
    for root in (store.root for store in stale_stores(own.parent) if store.root != own):
        try:
            if now - max(path.stat().st_mtime for path in (root, *root.iterdir())) > UNUSED_S:
                remove_store(root)
                removed.append(root)
        except (OSError, StoreError) as error:  # opened or removed by another process meanwhile
            log.info("%s is not removed: %s", root, error)
    return removed


def remove_store(root: Path, *, in_use: bool = False) -> None:
    """Remove the store in `root` with all its files; does nothing if there is none.

    Raises StoreBusy while a process has it open, unless `in_use` (readers then find their versions gone). Raises
    StoreError if the folder contains other files, after the store's own files have been removed.
    """
    try:
        lock = locks.try_lock_exclusive(root / names.USERS)
    except FileNotFoundError:
        return
    if lock is None and not in_use:
        raise StoreBusy(f"{root} is in use by {_read_owner(root) or 'another process'}")
    try:
        ours = [entry.name for entry in os.scandir(root) if names.is_store_file(entry.name)]
        for name in sorted(ours, key=lambda name: name == names.USERS):  # the lock file last: it protects the others
            (root / name).unlink(missing_ok=True)
        left = sorted(os.listdir(root))
        if left:
            raise StoreError(f"{root} also has {', '.join(left[:5])}, not of the store: remove them yourself")
        root.rmdir()
    finally:
        if lock is not None:
            lock.release()


def _is_of(root: Path, cluster: str) -> bool:
    """Whether the store is of a run of `cluster`; from now on, if it was of none."""
    mark = root / names.CLUSTER
    try:
        mark.symlink_to(cluster)
    except FileExistsError:
        return str(mark.readlink()) == cluster
    return True


def _write_owner(root: Path, run: Path | None) -> None:
    started, host = psutil.Process().create_time(), os.uname().nodename
    before = _read_owner(root)
    of = str(run.absolute()) if run is not None else before.run if before is not None else ""
    owner = StoreOwner(os.getpid(), started, host, time.time(), os.getcwd(), login_user(), of)
    (root / names.OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")


def _read_owner(root: Path) -> StoreOwner | None:
    try:
        return StoreOwner(**json.loads((root / names.OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _bytes_in(root: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(root))
