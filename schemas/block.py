"""Records of one class as columns, for steps that process many records but few of their fields.

Building a record from its columns takes tens of microseconds; reading a column takes nanoseconds per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.arrow import arrow_schema, build_records, flatten_records


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Records of class `kind`. `batch` has a column for each field; fields of nested records have dotted names."""

    kind: type
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @classmethod
    def of(cls, records: Sequence[Any]) -> Block:
        """`records`, one or more of one class. Raises TypeError or ValueError if a value does not fit its field."""
        return cls(type(records[0]), flatten_records(records))

    @classmethod
    def from_columns(cls, kind: type, columns: Mapping[str, Any]) -> Block:
        """Records of class `kind` from `columns`: Arrow or NumPy arrays or sequences of equal length, for every column.

        Raises KeyError, TypeError or ValueError (pyarrow's) if a column is missing or has the wrong type or length.
        """
        schema = arrow_schema(kind)
        arrays = [
            values if isinstance(values := columns[field.name], pa.Array) else pa.array(values, field.type)
            for field in schema
        ]
        return cls(kind, pa.RecordBatch.from_arrays(arrays, schema=schema))

    @classmethod
    def concat(cls, blocks: Sequence[Block]) -> Block:
        """One or more blocks of one class as one block."""
        return blocks[0] if len(blocks) == 1 else cls(blocks[0].kind, pa.concat_batches([b.batch for b in blocks]))

    def column(self, name: str) -> pa.Array:
        """The values of field `name`. Raises KeyError."""
        return self.batch.column(name)

    def slice(self, first: int, count: int) -> Block:
        """`count` records from index `first` on, without a copy."""
        return Block(self.kind, self.batch.slice(first, count))

    def take(self, rows: Sequence[int]) -> Block:
        """The records at indices `rows`, in that order."""
        return Block(self.kind, self.batch.take(pa.array(rows, pa.int64())))

    def records(self) -> list[Any]:
        """The records as objects. Raises ValueError if a value does not fit its field."""
        return build_records(self.kind, self.batch)
