"""How long a thread of a role waits for Python's interpreter while another one computes."""

from __future__ import annotations

import sys

INTERVAL_S = 0.0005


def switch_threads_sooner() -> None:
    """Let a waiting thread have the interpreter after `INTERVAL_S`; by default it waits for 5 ms.

    The threads of a role that read sockets, fold records and answer requests run for less than a millisecond at a time,
    and hand over to each other several times for a record. See docs/decisions/agents.md for what it gains.
    """
    sys.setswitchinterval(INTERVAL_S)
