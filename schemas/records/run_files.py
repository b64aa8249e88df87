"""The settings of a run and the small files of its model, for rollouts and relays on hosts that have neither."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunFilePart:
    """A part of the file `name`, whose bytes from `part` times `PART_BYTES` on are `data`.

    Written by rank 0 of the trainer, read by `laminar submit` of a role that joins by Kafka's address. `checksum` is
    the BLAKE3 of the whole file, by which it belongs to a `RunFiles`.
    """

    name: str
    part: int
    checksum: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files that the run has for hosts that join: their names, sizes in bytes, and BLAKE3 checksums.

    Written, after the parts, by rank 0 of the trainer; the last one in the log is valid.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    checksums: tuple[str, ...]
    written_at: int


PART_BYTES = 512 * 1024
"""Bytes of each part of a file but its last one."""
