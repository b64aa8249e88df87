"""Proof of an export: every offset in one part and one only, every file what its manifest says, its rows its own.

With the topic at hand each part is made again from the log, and must have the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from infra.storage import StorageFolder, list_folder, local_file
from operators.export.config import Contents
from operators.export.folder import DATA, TEMPORARY, ExportPart, next_offsets, read_contents, read_parts
from operators.export.formats import read_table, sha256

LogRows = Callable[[Contents, ExportPart], tuple[pa.Table, list[int]]]
"""The full rows that the log has of a part's offsets, and the offsets of what cannot be decoded."""
_KEYS = ("kafka_offset", "kafka_row")


@dataclass
class Verification:
    """What was looked at, and what is wrong with it: nothing, if `problems` is empty."""

    folder: str
    files: int = 0
    rows: int = 0
    bytes: int = 0
    undecodable: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By partition: the first offset, and the one after the last."""
    compared: bool = False
    problems: list[str] = field(default_factory=list)


def outline(root: StorageFolder) -> Verification:
    """What the manifests of the export in `root` say, and whether their ranges meet. Raises ExportError."""
    contents = read_contents(root)
    parts = _standing(root, read_parts(root))
    return Verification(
        folder=str(root),
        files=sum(bool(part.file) for part in parts),
        rows=sum(part.rows for part in parts),
        bytes=sum(part.bytes for part in parts),
        undecodable=sum(len(part.undecodable) for part in parts),
        offsets={
            p: (contents.starts[p], end) for p, end in next_offsets(contents, parts).items() if p in contents.starts
        },
        problems=list(_chain(contents, parts)),
    )


def verify(root: StorageFolder, log_rows: LogRows | None = None) -> Verification:
    """Look at every file of the export in `root`, too. Raises ExportError where there is none."""
    proof, contents = outline(root), read_contents(root)
    proof.compared = log_rows is not None
    parts = _standing(root, read_parts(root))
    for part in parts:
        proof.problems += [f"{part.file or _range(part)}: {what}" for what in _wrong(root, contents, part, log_rows)]
    known = {part.file for part in parts}
    for file in list_folder(root / DATA):
        if not file.name.startswith(TEMPORARY) and file.name not in known:
            proof.problems.append(f"{file.name}: no manifest knows it")
    return proof


def _standing(root: StorageFolder, parts: list[ExportPart]) -> list[ExportPart]:
    """`parts` without one whose file was about to get its name when its writer was killed: the next one gives it."""
    return [p for p in parts if not p.file or not (root / DATA / (TEMPORARY + p.file)).exists()]


def _chain(contents: Contents, parts: list[ExportPart]) -> Iterator[str]:
    for partition, start in contents.starts.items():
        following = start
        for part in parts:
            if part.partition != partition:
                continue
            if part.first > following:
                yield f"partition {partition}: offsets {following} to {part.first - 1} are missing"
            elif part.first < following:
                yield f"partition {partition}: offsets {part.first} to {following - 1} are there twice"
            following = max(following, part.last + 1)
    for part in parts:
        if part.partition not in contents.starts:
            yield f"{part.file}: the export has no partition {part.partition}"


def _wrong(root: StorageFolder, contents: Contents, part: ExportPart, log_rows: LogRows | None) -> Iterator[str]:
    rows = contents.schema.empty_table()
    if part.file:
        file = root / DATA / part.file
        if not file.exists():
            yield "the file is missing"
            return
        with local_file(file) as local:
            if local.stat().st_size != part.bytes or sha256(local) != part.sha256:
                yield "its bytes are not those that were written"
                return
            rows = read_table(local, contents.format, contents.schema)
    if len(rows) != part.rows:
        yield f"it has {len(rows)} rows, not {part.rows}"
    keys = _keys(rows)
    if len(set(keys)) != len(keys):
        yield "some of its rows are there twice"
    if any(not part.first <= offset <= part.last for offset, _ in keys):
        yield "it has rows of offsets that are not its own"
    if rows["kafka_partition"].to_pylist() != [part.partition] * len(rows):
        yield "it has rows of another partition"
    if log_rows is not None:
        full, undecodable = log_rows(contents, part)
        there = _keys(contents.made(contents.kept(full)))
        if contents.view == "preference" and part.replaces:  # pairs were made within each of the files before
            there = keys
        if there != keys:
            missing, extra = set(there) - set(keys), set(keys) - set(there)
            yield f"the log has {len(missing)} rows that it lacks, and lacks {len(extra)} that it has"
        if undecodable != [offset for offset, _ in part.undecodable]:
            yield f"the log has {len(undecodable)} undecodable records there, the manifest {len(part.undecodable)}"


def _keys(rows: pa.Table) -> list[tuple[int, int]]:
    return list(zip(*(rows[name].to_pylist() for name in _KEYS), strict=True))


def _range(part: ExportPart) -> str:
    return f"partition {part.partition}, offsets {part.first} to {part.last}"
