"""Notices that a run's folder was deleted, also when a role has created one of that name again."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from pipelines.run.run_kafka import RunLost


class RunFolderDeleted(RunLost):
    """The run's folder was deleted during the run."""


class HeldFolder:
    """The folder at `path`, held open: meanwhile a file system gives its inode number to no other one."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._handle)

    def check(self) -> None:
        """Raise RunFolderDeleted if `path` is no longer this folder."""
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._handle)):
                return
        except OSError:
            pass
        raise RunFolderDeleted(
            f"the run's folder {self._path} has been deleted during the run, with its checkpoints and the data of a "
            "local broker: start a new run"
        )
