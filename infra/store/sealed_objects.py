"""The files of weight versions in an object store: a version is its bytes and then its seal.

It is complete once its seal is there, and the seal goes first when the version is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from infra.storage import RangeReader, StorageFolder, list_folder, write_durable
from infra.store.names import SIDECAR, version_of
from schemas.records import PolicyVersion

MAX_SEAL_BYTES = 4096
"""Maximum bytes of a seal."""


def write_seal(folder: StorageFolder, version: PolicyVersion, size: int, blake3: str) -> None:
    """Complete `version`, whose `size` bytes are there. Raises OSError."""
    write_durable(_seal_file(folder, version), json.dumps({"bytes": size, "blake3": blake3}))


def remove_versions_before(folder: StorageFolder, newest: PolicyVersion, keep: int) -> None:
    """Keep `newest` and the newest before it, `keep` in all; remove the others, and what was not written to its end.

    Raises OSError.
    """
    sealed = [version for version in sealed_versions(folder) if version <= newest]
    for file in list_folder(folder):
        version = version_of(file.name)
        if version is not None and version < newest and version not in sealed[:keep]:
            if version in sealed:
                _seal_file(folder, version).unlink()
            file.unlink()


def sealed_versions(folder: StorageFolder) -> list[PolicyVersion]:
    """The complete versions in `folder`, newest first; none if it does not exist. Raises OSError."""
    present = {file.name for file in list_folder(folder)} if folder.exists() else set()
    return sorted(_with_seals(folder, present), reverse=True)


def has_version(folder: StorageFolder, version: PolicyVersion, blake3: str) -> bool:
    """Whether `folder` has the bytes of `version` whose digest is `blake3`. Raises OSError."""
    try:
        with RangeReader(_seal_file(folder, version)) as source:
            text = bytearray(min(source.size, MAX_SEAL_BYTES))
            source.read_into(0, memoryview(text))
        content = json.loads(text)
    except (FileNotFoundError, ValueError, RecursionError):  # there is none, or it is no seal
        return False
    return isinstance(content, dict) and content.get("blake3") == blake3


def _with_seals(folder: StorageFolder, names: set[str]) -> Iterator[PolicyVersion]:
    for name in names:
        if (version := version_of(name)) is not None and _seal_file(folder, version).name in names:
            yield version


def _seal_file(folder: StorageFolder, version: PolicyVersion) -> StorageFolder:
    return folder / f"{version}{SIDECAR}"
