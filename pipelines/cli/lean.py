"""Arrow without pandas, for commands that answer at once.

pyarrow imports pandas, where there is one, with the first array that it makes: half a second, which is as long as all
else that looking at a topic needs.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _NotNow(MetaPathFinder):
    """Has no pandas for the first who asks: pyarrow, which asks once."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "pandas":
            sys.meta_path.remove(self)
            raise ModuleNotFoundError("pandas is left out of this process")


def without_pandas() -> None:
    """Let pyarrow go without pandas in this process, where it has not asked for it yet."""
    if "pyarrow" not in sys.modules:
        sys.meta_path.insert(0, _NotNow())
