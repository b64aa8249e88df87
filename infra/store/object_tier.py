"""Copies of weight versions in an object store, or a folder that all machines mount: what machines start from that
reach no other one with the weights.

A version is two files, its bytes and then its seal: it is complete once its seal is there, and the seal goes first when
the version is removed. Readers compare every byte with the manifest, so the store need not be trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager

from infra.storage import RangeReader, RemotePath, StorageFolder, list_folder, write_durable
from infra.store import newest_copier
from infra.store.names import SIDECAR, version_of, weight_file
from infra.store.newest_copier import NewestCopier
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from schemas.records import PolicyVersion

MAX_SEAL_BYTES = 4096
"""Maximum bytes of a seal."""


class ObjectTier(NewestCopier):
    """Copies versions of `store` to `folder`, which keeps the newest `keep`; see NewestCopier for `every_s`."""

    def __init__(
        self, store: WeightStore, folder: StorageFolder, keep: int, every_s: float, system: System = SYSTEM
    ) -> None:
        self.folder, self._keep = folder, keep
        super().__init__(store, str(folder), every_s, system)

    def has(self, version: PolicyVersion, blake3: str) -> bool:
        """Whether the store has these bytes of `version`. Raises OSError."""
        return has_version(self.folder, version, blake3)

    def reading(self, version: PolicyVersion) -> AbstractContextManager[RangeReader]:
        """Read the bytes of `version` during the `with` block. Raises OSError."""
        return RangeReader(self.folder / weight_file(version))

    def copy(self, version: PolicyVersion) -> None:
        """As NewestCopier: two files, the seal last; then older versions are removed."""
        seal = self._store.seal(version)
        if not self.has(version, seal.blake3):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._store.read(version, seal.blake3) as data:
                if not self._write(self.folder / weight_file(version), data):
                    return
            write_durable(_seal_file(self.folder, version), json.dumps({"bytes": seal.bytes, "blake3": seal.blake3}))
        self._remove_old(version)

    def _write(self, file: StorageFolder, data: memoryview) -> bool:
        """Write `data` to `file`; False if this was closed before the end."""
        with file.open_output() if isinstance(file, RemotePath) else file.open("wb") as sink:
            for begin in range(0, len(data), newest_copier.PART):
                if self.closed:
                    return False
                sink.write(data[begin : begin + newest_copier.PART])
        return True

    def _remove_old(self, newest: PolicyVersion) -> None:
        """Remove the versions before `newest` but for the newest of them, and what was not written to its end."""
        sealed = [version for version in sealed_versions(self.folder) if version <= newest]
        kept = sealed[: self._keep]
        for file in list_folder(self.folder):
            version = version_of(file.name)
            if version is not None and version < newest and version not in kept:
                if version in sealed:
                    _seal_file(self.folder, version).unlink()
                file.unlink()


def sealed_versions(folder: StorageFolder) -> list[PolicyVersion]:
    """The complete versions in `folder`, newest first; none if it does not exist. Raises OSError."""
    present = {file.name for file in list_folder(folder)} if folder.exists() else set()
    return sorted(_with_seals(folder, present), reverse=True)


def has_version(folder: StorageFolder, version: PolicyVersion, blake3: str) -> bool:
    """Whether `folder` has the bytes of `version` whose digest is `blake3`. Raises OSError."""
    seal = _seal_file(folder, version)
    if not seal.exists():
        return False
    try:
        content = json.loads(seal.read_bytes()[:MAX_SEAL_BYTES])
    except (FileNotFoundError, ValueError):  # removed meanwhile, or no seal
        return False
    return isinstance(content, dict) and content.get("blake3") == blake3


def _with_seals(folder: StorageFolder, names: set[str]) -> Iterator[PolicyVersion]:
    for name in names:
        if (version := version_of(name)) is not None and _seal_file(folder, version).name in names:
            yield version


def _seal_file(folder: StorageFolder, version: PolicyVersion) -> StorageFolder:
    return folder / f"{version}{SIDECAR}"
