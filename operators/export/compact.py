"""Compaction: joins consecutive files of one partition into one file of all their offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import pyarrow as pa

from infra.storage import StorageFolder, local_file
from operators.export.config import Contents
from operators.export.folder import DATA, ExportFolder, ExportPart
from operators.export.formats import read_table


def compact(root: StorageFolder, target_bytes: int) -> int:
    """Join the files of the export in `root` up to about `target_bytes` each; returns how many files fewer there are.

    After a kill every offset is still in exactly one valid file; the next process to open the folder deletes the
    replaced files. Raises ExportError if the folder is not an export or an export is writing to it.
    """
    with ExportFolder(root) as folder:
        runs = [run for run in joinable(folder.parts, target_bytes) if len(run) > 1]
        before = sum(bool(part.file) for run in runs for part in run)
        after = 0
        for run in runs:
            tables = [_read(root / DATA / part.file, folder.contents) for part in run if part.file]
            joined = folder.add(
                run[0].partition,
                run[0].first,
                run[-1].last,
                pa.concat_tables(tables) if tables else folder.contents.schema.empty_table(),
                [letter for part in run for letter in part.undecodable],
                [part.range for part in run],
            )
            after += bool(joined.file)
        return before - after


def _read(file: StorageFolder, contents: Contents) -> pa.Table:
    with local_file(file) as local:
        return read_table(local, contents.format, contents.schema)


def joinable(parts: Sequence[ExportPart], target_bytes: int) -> Iterator[list[ExportPart]]:
    """`parts`, sorted by partition and offset, as runs of consecutive ones of at most `target_bytes` in total.

    A larger part is a run of its own.
    """
    for _, of_partition in groupby(parts, lambda part: part.partition):
        run: list[ExportPart] = []
        for part in of_partition:
            if run and sum(each.bytes for each in run) + part.bytes > target_bytes:
                yield run
                run = []
            run.append(part)
        yield run
