"""Types of array fields of records: immutable Arrow arrays of the annotated element type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

if TYPE_CHECKING:
    from pyarrow import Array
else:
    Array = Any  # readers of control records do not import pyarrow, see `codec`

TokenIds: TypeAlias = Annotated[Array, "int32"]
"""int32[n] token ids."""
Floats: TypeAlias = Annotated[Array, "float"]
"""float32[n], logprobs in nats."""
Flags: TypeAlias = Annotated[Array, "bool"]
"""bool[n], True where a token was sampled by the policy (loss mask 1)."""
Integers: TypeAlias = Annotated[Array, "int64"]
"""int64[n]."""
