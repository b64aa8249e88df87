"""Calls an agent's function in a process of its own: `python -m operators.agents.call_function module:function`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from infra.name_lookup import import_user_module

MAX_RETRIES = 10
"""Of the client: it outlasts a restart of the gateway."""


def main(target: str) -> None:
    """Call `target` with a client and the task, and write what it returns to the report file."""
    import openai

    module, _, name = target.rpartition(":")
    function = getattr(import_user_module(module), name, None)
    if not callable(function):
        raise SystemExit(f"{module} has no function {name!r}")
    task = json.loads(os.environ["LAMINAR_TASK"])
    with openai.OpenAI(max_retries=MAX_RETRIES) as client:
        report = report_of(function(client, task))
    Path(os.environ["LAMINAR_REPORT"]).write_text(json.dumps(report))


def report_of(returned: Any) -> dict[str, Any]:
    """The report that a function's return value stands for. Raises TypeError for any other value."""
    if returned is None:
        return {}
    if isinstance(returned, bool | int | float):
        return {"reward": float(returned)}
    if isinstance(returned, str):
        return {"answer": returned}
    if isinstance(returned, dict) and returned.keys() <= {"reward", "answer"}:
        return returned
    raise TypeError(f"an agent must return a reward, an answer, both as a dict, or None, not {str(returned)[:80]!r}")


if __name__ == "__main__":
    main(sys.argv[1])
