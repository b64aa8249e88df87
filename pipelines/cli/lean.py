"""What commands that answer at once go without: pandas, and a connection for each look.

pyarrow imports pandas, where there is one, with the first array that it makes: half a second, which is as long as all
else that looking at a topic needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any


class _NoPandas(MetaPathFinder):
    """Says that there is no pandas. Not None in `sys.modules`: pyarrow would take that for the module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out of this process")


@contextmanager
def looking() -> Iterator[None]:
    """Let this process go without pandas, unless it has it already, and its looks into topics share connections."""
    sys.meta_path.insert(0, _NoPandas())
    from infra.kafka.consumers import kept_open

    with kept_open():
        yield
