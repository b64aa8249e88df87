"""Deleting runs: their folders, their weight stores in shared memory and, if asked, their topics.

A folder is renamed first: from then on it is no run, and after a kill the next deletion ends what this one has begun.
Links in it are removed, and not followed.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.files import sync_path
from infra.kafka.broker import running_broker
from infra.processes import is_locked
from infra.runners.liveness import read_liveness, working_pid
from infra.store.errors import StoreBusy
from infra.store.names import SHARED_MEMORY
from infra.store.ownership import is_used, remove_store, stores_of
from pipelines.inspect.run_files import LATEST, LOGS, ZYGOTE_LOG
from pipelines.inspect.run_folders import RunFolder, being_deleted, read_any, run_command
from pipelines.inspect.submissions import submissions
from pipelines.inspect.weight_places import copies_of


class DeletionRefused(RuntimeError):
    """The run cannot be deleted now. The message has the reason and the remedy."""


@dataclass(frozen=True)
class Deletion:
    """What deleting the run `folder` removes. `unfinished`: an earlier deletion of it was killed, and left this folder.

    `freed_bytes` are those of the files; `stores` have theirs.
    """

    folder: Path
    unfinished: Path | None
    freed_bytes: int
    stores: Mapping[Path, int]

    @property
    def newest(self) -> Path:
        """The folder that exists."""
        return self.folder if self.folder.exists() or self.unfinished is None else self.unfinished


def plan_deletion(runs: Path, name: str, shared_memory: Path = SHARED_MEMORY) -> Deletion:
    """What deleting the run `name` of the folder `runs` removes. Raises DeletionRefused, NoSuchRun."""
    if "/" in name or name.startswith(".") or not name:
        raise DeletionRefused(
            f"{name!r} is no name of a run in {runs}/: `laminar runs list` shows them, --folder names another folder"
        )
    folder = runs / name
    if folder.is_symlink():
        raise DeletionRefused(f"{folder} is a link to {folder.readlink()}: name the run itself, or remove the link")
    unfinished = being_deleted(folder)
    begun = unfinished.is_dir() and not unfinished.is_symlink()
    if folder.exists() or not begun:
        refuse_active(read_any(folder))
    stores = dict(stores_of(folder, shared_memory)) | {each: bytes_of(each) for each in copies_of(name, folder)}
    if used := next(filter(is_used, stores), None):
        raise DeletionRefused(f"run {name}: a process uses its weight store {used}: stop what reads or writes weights")
    freed = sum(bytes_of(each) for each in (folder, unfinished) if each.is_dir())
    return Deletion(folder, unfinished if begun else None, freed, stores)


def refuse_active(run: RunFolder) -> None:
    """Raise DeletionRefused if `run` is running, or any of its processes is alive."""
    folder = run.folder
    if (host := run.other_host) is not None:
        raise DeletionRefused(f"run {folder.name} runs on {host}: stop it there")
    if run.status == "running":
        raise DeletionRefused(f"run {folder.name} is running: `{run_command(folder, 'runs stop')}` stops it")
    if live := ", ".join(_live_processes(folder)):
        raise DeletionRefused(f"run {folder.name} has ended, but processes of it are alive: {live}. Stop them first")


def _live_processes(folder: Path) -> Iterator[str]:
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        if (broker := running_broker((folder / "kafka").resolve())) is not None:
            yield f"its Kafka broker (process {broker.pid})"
    if is_locked(folder / LOGS / ZYGOTE_LOG):
        yield "its roles, here or in another container"
    for each in submissions(folder):
        if each.status in ("up", "unsupervised"):
            yield f"{each.role.name} of `laminar submit`"
        elif is_locked(each.log):
            yield f"{each.role.name} of `laminar submit`, in another container"
    for file in sorted((folder / "alive").glob("*.json")):
        if (pid := working_pid(read_liveness(file))) is not None:
            yield f"{file.stem} (process {pid})"


def delete_run(planned: Deletion, delete_topics: Callable[[], None] = lambda: None) -> None:
    """Delete the run of `planned`, and before its files its topics.

    Raises DeletionRefused if it was started meanwhile, OSError if a file stays.
    """
    folder, unfinished = planned.folder, being_deleted(planned.folder)
    if planned.unfinished is not None:
        shutil.rmtree(planned.unfinished)  # does not follow links, nor such that replace a folder meanwhile
    if folder.exists():
        folder.rename(unfinished)
        if read_any(unfinished).status == "running":  # its supervisor wrote its state before the folder was renamed
            unfinished.rename(folder)
            raise DeletionRefused(f"run {folder.name} was started meanwhile")
        sync_path(folder.parent)
    latest = folder.parent / LATEST
    if latest.is_symlink() and latest.readlink().name == folder.name:
        latest.unlink()
    delete_topics()
    for store in planned.stores:
        try:
            remove_store(store)
        except StoreBusy as error:
            raise DeletionRefused(f"{error}; delete the run again once it has ended") from error
    if unfinished.is_dir():
        shutil.rmtree(unfinished)


def bytes_of(folder: Path) -> int:
    """The bytes of the files in `folder` that are nowhere else; what links name does not count."""
    links: dict[tuple[int, int], int] = {}
    freed = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode):
                continue
            file = (found.st_dev, found.st_ino)
            links[file] = links.get(file, 0) + 1
            freed += found.st_size if links[file] == found.st_nlink else 0
    return freed
