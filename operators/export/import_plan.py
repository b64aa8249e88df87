"""The ids that rows of a dataset get in the importing run: a pure function of their groups, in their order.

Ids of imported trajectories have a letter and numbers of their own (`i0.0`), so they never equal an id from placement.
The rows of a group in the dataset become a complete group of that size, so the buffer waits for no missing member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.files import sha256_of
from infra.storage import StorageFolder, local_file
from operators.export.config import Contents
from operators.export.folder import DATA, ExportError, ExportPart, read_parts
from operators.export.formats import read_table


class ImportedSpan(NamedTuple):
    """By partition: the first offset of the dataset to import, and the offset after the last."""

    first: Mapping[int, int]
    end: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """For each row, int64[rows]: group number from 0, member, and group size. `groups` is the number of groups."""

    numbers: np.ndarray
    members: np.ndarray
    sizes: np.ndarray
    groups: int

    def __len__(self) -> int:
        return len(self.numbers)


def plan_groups(groups: pa.Array) -> ImportPlan:
    """Number the groups by their first row, and the members by their order."""
    codes = groups.dictionary_encode().indices.to_numpy().astype(np.int64)
    counts = np.bincount(codes)
    order = np.argsort(codes, kind="stable")
    members = np.empty(len(codes), np.int64)
    members[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ImportPlan(codes, members, counts[codes], len(counts))


def check_importable(contents: Contents) -> None:
    """Raise ExportError if a dataset of `contents` lacks the columns of experiences."""
    if contents.topic != "experiences" or contents.view != "full":
        what = f"view {contents.view} of {contents.topic}"
        raise ExportError(f"only experiences with the view full can be imported: this is the {what}")


def import_tables(
    root: StorageFolder, contents: Contents, span: ImportedSpan, columns: pa.Schema
) -> Iterator[pa.Table]:
    """`columns` of the rows to import, file by file, always in the same order, without held-out (evaluation) rows.

    Raises ExportError if a file differs from its manifest.
    """
    needed = {"purpose", "kafka_offset"} - set(columns.names)
    schema = pa.schema([*columns, *(contents.schema.field(name) for name in sorted(needed))])
    for part in read_parts(root):
        first, end = (edges.get(part.partition, 0) for edges in span)
        if part.file and part.last >= first and part.first < end:
            rows = _read(root, contents, part, schema)
            offsets = rows["kafka_offset"]
            in_span = pc.and_(pc.greater_equal(offsets, first), pc.less(offsets, end))
            selected = pc.and_(in_span, pc.not_equal(rows["purpose"], "evaluation"))
            yield rows.filter(selected, null_selection_behavior="drop").select(columns.names)


def plan_import(root: StorageFolder, contents: Contents, span: ImportedSpan) -> ImportPlan:
    """The plan of all rows of `import_tables`. Raises ExportError."""
    field = contents.schema.field("group_id")
    groups = [table["group_id"] for table in import_tables(root, contents, span, pa.schema([field]))]
    chunks = [chunk for column in groups for chunk in column.chunks]
    return plan_groups(pa.chunked_array(chunks, field.type).combine_chunks())


def _read(root: StorageFolder, contents: Contents, part: ExportPart, schema: pa.Schema) -> pa.Table:
    file = root / DATA / part.file
    try:
        with local_file(file) as local:
            if sha256_of(local) != part.sha256:
                raise ExportError(f"{file}: its bytes differ from its manifest; run `laminar export verify {root}`")
            return read_table(local, contents.format, schema)
    except (OSError, ValueError) as error:
        raise ExportError(f"{file} cannot be imported: {error}") from error
