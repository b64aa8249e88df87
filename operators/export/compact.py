"""Fewer, larger files: neighbours of one partition become one file of all their offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import pyarrow as pa

from infra.storage import StorageFolder, local_file
from operators.export.config import Contents
from operators.export.folder import DATA, ExportFolder, ExportPart
from operators.export.formats import read_table


def compact(root: StorageFolder, target_bytes: int) -> int:
    """Join the files of the export in `root` up to about `target_bytes` each; how many are fewer.

    A kill leaves every offset in one file that counts: the next one to open the folder removes what was replaced.
    Raises ExportError where the folder is none, or an export is writing to it.
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
    """`parts`, by partition and offset, as runs of neighbours of at most `target_bytes`, or of one that is larger."""
    for _, of_one in groupby(parts, lambda part: part.partition):
        run: list[ExportPart] = []
        for part in of_one:
            if run and sum(each.bytes for each in run) + part.bytes > target_bytes:
                yield run
                run = []
            run.append(part)
        yield run
