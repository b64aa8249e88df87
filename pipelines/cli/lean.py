"""Arrow without pandas, for commands that answer at once.

pyarrow imports pandas, where there is one, with the first array that it makes: half a second, which is as long as all
else that looking at a topic needs.
"""

from __future__ import annotations

import sys


def without_pandas() -> None:
    """Let this process go without pandas, unless it has it already: for Python, None is a module that is not there."""
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
