"""Array fields of records: immutable Arrow arrays, which compare by value and cross to NumPy without a copy."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import pyarrow as pa

TokenIds: TypeAlias = Annotated[pa.Array, pa.int32()]
"""int32[n] token ids."""
Floats: TypeAlias = Annotated[pa.Array, pa.float32()]
"""float32[n], logprobs in nats."""
Flags: TypeAlias = Annotated[pa.Array, pa.bool_()]
"""bool[n], True where a token was sampled by the policy (loss mask 1)."""
Integers: TypeAlias = Annotated[pa.Array, pa.int64()]
"""int64[n]."""


def token_ids(values: object) -> pa.Array:
    """An int32 Arrow array of `values` (a NumPy array or a sequence of ints)."""
    return pa.array(values, pa.int32())


def floats(values: object) -> pa.Array:
    """A float32 Arrow array of `values`."""
    return pa.array(values, pa.float32())


def flags(values: object) -> pa.Array:
    """A bool Arrow array of `values`."""
    return pa.array(values, pa.bool_())


def integers(values: object) -> pa.Array:
    """An int64 Arrow array of `values`."""
    return pa.array(values, pa.int64())


def one_list(kind: pa.DataType, values: object) -> pa.Array:
    """A column of list type `kind` with one row, which has `values`; an Arrow array or a NumPy one of its element's
    type is not copied."""
    items = values if isinstance(values, pa.Array) else pa.array(values, kind.value_type)
    return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items, type=kind)
