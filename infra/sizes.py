"""Sizes in bytes, as text."""

from __future__ import annotations

GIB = 1 << 30
_UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size_text(size: int) -> str:
    """`size` bytes in the largest unit of which they are a tenth or more: `0.5 GiB`, `64.0 MiB`, `12 bytes`."""
    for unit, name in _UNITS:
        if size >= unit / 10:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
