"""What commands that answer at once go without: pandas, NumPy, a connection for each look, and searches for cycles.

pyarrow imports NumPy where there is one, and pandas with the first array that it makes: half a second and a fifth,
where all else that looking at a topic needs takes half a second. Reading and printing needs neither. Python's collector
goes through what is imported time and again: a tenth of it all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

from infra.runners.garbage_collection import reduce_gc_frequency


class _LeftOut(MetaPathFinder):
    """Says that there are no such packages. Not None in `sys.modules`: pyarrow would take that for the module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname in ("numpy", "pandas"):
            raise ModuleNotFoundError(f"{fullname} is left out of this process")


@contextmanager
def light_imports() -> Iterator[None]:
    """Let this process go without them, unless it has them already; its looks into topics share connections."""
    reduce_gc_frequency()
    sys.meta_path.insert(0, _LeftOut())
    from infra.kafka.consumers import kept_open

    with kept_open():
        yield
