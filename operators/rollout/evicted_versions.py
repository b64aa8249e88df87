"""Weight versions that this machine's store has evicted: commands find them, and write one at a time to a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from infra.processes import die_with_parent_command
from schemas.records import PolicyVersion

MOST = 2
"""Versions that are kept in the folder."""
TIMEOUT_S = 600.0
WEIGHTS = "model.safetensors"

Find = Callable[[str, Collection[PolicyVersion]], PolicyVersion]


class PulledVersion(NamedTuple):
    """A version, and the file with its weights."""

    version: PolicyVersion
    file: Path


class EvictedVersions:
    """Pulls versions to `folder`, which it empties first.

    `listing` is a command that prints each version of the run and `where` it is, as JSON; `pull`, followed by a version
    and a new folder, writes that version there. They run in `environment`, one at a time; the methods do not wait for
    them. `find` returns the version that a name means.
    """

    def __init__(
        self, listing: tuple[str, ...], pull: tuple[str, ...], folder: Path, environment: Mapping[str, str], find: Find
    ) -> None:
        self._listing, self._pull, self._folder, self._find = listing, pull, folder, find
        self._environment = environment
        self._pulled: dict[str, Future[PulledVersion]] = {}
        """By the name that a request has for the version."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pull-version")
        self._number = 0
        shutil.rmtree(folder, ignore_errors=True)

    def get(self, name: str, awaited: Iterable[str]) -> PulledVersion | None:
        """The version `name`; None if it has to be pulled first, which begins now. Raises LookupError if it cannot be
        served; the next call tries again. Versions with a name in `awaited` are kept.
        """
        found = self._pulled.get(name)
        if found is None:
            self._number += 1
            self._pulled[name] = self._threads.submit(self._fetch, name, self._folder / str(self._number))
            return None
        if not found.done():
            return None
        if found.exception() is not None:
            del self._pulled[name]
        else:
            self._drop({*awaited, name})
        return found.result()

    def _drop(self, kept: set[str]) -> None:
        """Remove the oldest versions but `MOST`."""
        pulled = [name for name, each in self._pulled.items() if each.done() and each.exception() is None]
        for name in [each for each in pulled if each not in kept][: max(0, len(pulled) - MOST)]:
            shutil.rmtree(self._pulled.pop(name).result().file.parent, ignore_errors=True)

    def _fetch(self, name: str, folder: Path) -> PulledVersion:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            rows = json.loads(self._run(self._listing))
        except LookupError as error:
            missing = f"this machine's store has no weight version {name!r}"
            raise LookupError(f"{missing}, and older ones cannot be listed: {error}") from error
        places = {PolicyVersion.parse(row["version"]): row["where"] for row in rows}
        servable = ", ".join(str(each) for each in sorted(places) if places[each]) or "none"
        try:
            version = self._find(name, places)
        except LookupError as error:
            raise LookupError(f"the run has no weight version {name!r}; it can serve {servable}") from error
        self._run((*self._pull, str(version), str(folder)))
        if not (file := folder / WEIGHTS).is_file():
            raise LookupError(f"weight version {version} is not in one file {WEIGHTS}")
        return PulledVersion(version, file)

    def _run(self, command: tuple[str, ...]) -> str:
        """What `command` prints. Raises LookupError with its last line of error if it fails."""
        options: dict[str, Any] = {"env": self._environment, "stdin": subprocess.DEVNULL, "timeout": TIMEOUT_S}
        try:
            done = subprocess.run(die_with_parent_command([*command]), capture_output=True, text=True, **options)
        except subprocess.TimeoutExpired as error:
            raise LookupError(f"it took longer than {TIMEOUT_S:g} s") from error
        if done.returncode:
            last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise LookupError(last.removeprefix("laminar: "))
        return done.stdout
