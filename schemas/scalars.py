"""Checks of scalar values, shared by both encodings, so that every written record can be read."""

from __future__ import annotations

import math
import operator
from typing import Any

_INT64 = range(-(2**63), 2**63)
LARGEST_REWARD = 1e100
"""Of a turn, a verifier or a trajectory, in absolute value: the sum of two numbers near 1.8e308 is not finite."""


def checked_scalar(where: str, of: type, value: Any) -> Any:
    """`value` as the scalar type `of`: str, int, float, bool or bytes.

    NumPy numbers are accepted, and integers for floats. Raises TypeError for another type, ValueError for an integer
    beyond 64 bits, a float that is not finite, and a string with lone surrogates.
    """
    if of is float and type(value) is float and math.isfinite(value):
        return value
    if of is str and isinstance(value, str):
        if not value.isascii():
            value.encode()  # UnicodeEncodeError is a ValueError
        return value
    if of is int and type(value) is int and value in _INT64:
        return value
    if of is int and hasattr(value, "__index__") and not isinstance(value, bool):
        number = operator.index(value)
        if number not in _INT64:
            raise ValueError(f"{where}: an integer beyond 64 bits")
        return number
    if of is float and hasattr(value, "__float__") and not isinstance(value, bool):
        return checked_float(where, value)
    if of in (bool, bytes) and isinstance(value, of):
        return value
    raise TypeError(f"{where}: expected {of.__name__}, got {type(value).__name__}")


def all_int64(values: list[Any]) -> bool:
    """Whether all `values` are plain integers within 64 bits."""
    return set(map(type, values)) <= {int} and (not values or (min(values) in _INT64 and max(values) in _INT64))


def checked_float(where: str, value: Any) -> float:
    """`value` as a float. Raises ValueError if it is not finite."""
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{where}: an integer too large for a float") from error
    if not math.isfinite(number):
        raise ValueError(f"{where}: {number} is not finite")
    return number
