"""A process that a server of an agent's function forks for an episode."""

from __future__ import annotations

import os
from pathlib import Path

from operators.agents.function_server import _call


def test_process_of_a_server_that_was_killed_first_does_nothing(tmp_path: Path) -> None:
    """The kernel kills a process when its parent ends, but not if the parent has ended before that was asked for."""
    order = {"number": 0, "memory_limit_mb": None, "transcript": str(tmp_path / "transcript")}
    pid = os.fork()
    if not pid:
        _call(None, None, order, server=-1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not (tmp_path / "transcript").exists()
