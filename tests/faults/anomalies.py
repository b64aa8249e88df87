"""Finds anomalies in the copies of a `CopyingShard`, from the log alone.

The names are those of Jepsen's tests of Kafka; "torn" is what Adya calls a fractured write.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from faults.log_files import LoggedRecord

SETTLES_S = 30.0
"""How long a transaction may stay open after the last commit: the coordinator writes markers after its response."""
HALVES = (b"a", b"b")


@dataclass(frozen=True)
class Anomalies:
    """The numbers with an anomaly; false if there are none."""

    lost_writes: tuple[int, ...] = ()
    """Their offset is committed, but no committed transaction has their output."""
    duplicates: tuple[int, ...] = ()
    """Their output is committed more than once."""
    torn_transactions: tuple[int, ...] = ()
    """Only one half of their output is committed."""

    def __bool__(self) -> bool:
        return bool(self.lost_writes or self.duplicates or self.torn_transactions)


def anomalies(output: Iterable[LoggedRecord], numbers: int) -> Anomalies:
    """The anomalies of `output` after the numbers below `numbers` have been copied."""
    copies = Counter(tuple((r.value or b"").split(b"/")) for r in output if r.outcome == "committed")
    halves = [[copies[str(n).encode(), half] for half in HALVES] for n in range(numbers)]
    return Anomalies(
        tuple(n for n, both in enumerate(halves) if max(both) == 0),
        tuple(n for n, both in enumerate(halves) if max(both) > 1),
        tuple(n for n, both in enumerate(halves) if min(both) == 0 < max(both)),
    )


def settled(read: Callable[[], list[LoggedRecord]]) -> list[LoggedRecord]:
    """The records of `read` once none has an open transaction. Raises AssertionError for a hanging transaction."""
    deadline = time.monotonic() + SETTLES_S
    while True:
        records = read()
        hanging = [record for record in records if record.outcome == "open"]
        if not hanging:
            return records
        assert time.monotonic() < deadline, f"hanging transaction of producer {hanging[0].producer}: {hanging[0]}"
        time.sleep(0.02)
