"""A faster start of read-only commands: no NumPy, no pandas, shared Kafka connections, rare garbage collection.

pyarrow imports NumPy if it is installed (0.5 s), and pandas with its first array (0.2 s); everything else that a
read-only command needs takes 0.5 s. Reading and printing records need neither. Garbage collection during the imports
takes a tenth of the total.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

from infra.runners.garbage_collection import reduce_gc_frequency


class _BlockedImports(MetaPathFinder):
    """Rejects the import of NumPy and pandas. None in `sys.modules` would not do: pyarrow takes it for the module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname in ("numpy", "pandas"):
            raise ModuleNotFoundError(f"{fullname} is not available in read-only commands")


@contextmanager
def light_imports() -> Iterator[None]:
    """Block NumPy and pandas, unless they are loaded already, and share Kafka connections between the reads."""
    reduce_gc_frequency()
    sys.meta_path.insert(0, _BlockedImports())
    from infra.kafka.consumers import reuse_consumers

    with reuse_consumers():
        yield
