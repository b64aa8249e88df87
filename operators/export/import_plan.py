"""Who rows of a dataset become in a run that they are fed to: a pure function of their groups, in their order.

Ids of imported trajectories have a letter and numbers of their own (`i0.0`), so none is ever one of placement's. What a
dataset has of a group is a group of that many members: whoever waits for it waits for nobody who will not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.storage import StorageFolder, local_file
from operators.export.config import Contents
from operators.export.folder import DATA, ExportError, ExportPart, read_parts
from operators.export.formats import read_table, sha256


class Span(NamedTuple):
    """By partition: the first offset of a dataset that is to be imported, and the one after the last."""

    first: Mapping[int, int]
    end: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Who each row is: group number from 0, member, and how many its group has; int64[rows], `groups` different."""

    numbers: np.ndarray
    members: np.ndarray
    sizes: np.ndarray
    groups: int

    def __len__(self) -> int:
        return len(self.numbers)


def plan_rows(groups: pa.Array) -> ImportPlan:
    """Number groups by the first of their rows, and members by their order."""
    codes = groups.dictionary_encode().indices.to_numpy().astype(np.int64)
    counts = np.bincount(codes)
    order = np.argsort(codes, kind="stable")
    members = np.empty(len(codes), np.int64)
    members[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ImportPlan(codes, members, counts[codes], len(counts))


def importable(contents: Contents) -> None:
    """Raise ExportError where a dataset of `contents` has not got what experience is made of."""
    if contents.topic != "experiences" or contents.view != "full":
        what = f"view {contents.view} of {contents.topic}"
        raise ExportError(f"only experiences can be imported, exported with the view full: this is the {what}")


def tables(root: StorageFolder, contents: Contents, span: Span, columns: pa.Schema) -> Iterator[pa.Table]:
    """Those `columns` of the rows to import, file by file, always in the same order; what was held out is left out.

    Raises ExportError where a file is not what its manifest says.
    """
    needed = {"purpose", "kafka_offset"} - set(columns.names)
    schema = pa.schema([*columns, *(contents.schema.field(name) for name in sorted(needed))])
    for part in read_parts(root):
        first, end = (edges.get(part.partition, 0) for edges in span)
        if part.file and part.last >= first and part.first < end:
            rows = _read(root, contents, part, schema)
            offsets = rows["kafka_offset"]
            inside = pc.and_(pc.greater_equal(offsets, first), pc.less(offsets, end))
            wanted = pc.and_(inside, pc.not_equal(rows["purpose"], "evaluation"))
            yield rows.filter(wanted, null_selection_behavior="drop").select(columns.names)


def plan_of(root: StorageFolder, contents: Contents, span: Span) -> ImportPlan:
    """The plan of all rows of `tables`. Raises ExportError."""
    field = contents.schema.field("group_id")
    groups = [table["group_id"] for table in tables(root, contents, span, pa.schema([field]))]
    chunks = [chunk for column in groups for chunk in column.chunks]
    return plan_rows(pa.chunked_array(chunks, field.type).combine_chunks())


def _read(root: StorageFolder, contents: Contents, part: ExportPart, schema: pa.Schema) -> pa.Table:
    file = root / DATA / part.file
    try:
        with local_file(file) as local:
            if sha256(local) != part.sha256:
                raise ExportError(
                    f"{file}: its bytes are not those that were written; see `laminar export verify {root}`"
                )
            return read_table(local, contents.format, schema)
    except (OSError, ValueError) as error:
        raise ExportError(f"{file} cannot be imported: {error}") from error
