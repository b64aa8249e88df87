"""What is wrong with the copies that a `CopyingShard` made, by what is in the log and by nothing else.

The names are those of Jepsen's tests of Kafka; "torn" is what Adya calls a fractured write.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from faults.log_files import LoggedRecord

SETTLES_S = 30.0
"""How long a transaction may stay open after the last commit: the coordinator writes its markers after its answer."""
HALVES = (b"a", b"b")


@dataclass(frozen=True)
class Anomalies:
    """The numbers of which something is wrong; false where nothing is."""

    lost_writes: tuple[int, ...] = ()
    """Their offset is committed, and no committed transaction has their output."""
    duplicates: tuple[int, ...] = ()
    """Their output is committed more than once."""
    torn_transactions: tuple[int, ...] = ()
    """One half of their output is committed, the other is not."""

    def __bool__(self) -> bool:
        return bool(self.lost_writes or self.duplicates or self.torn_transactions)


def anomalies(output: Iterable[LoggedRecord], numbers: int) -> Anomalies:
    """What is wrong with `output`, once the numbers below `numbers` are copied."""
    copies = Counter(tuple((r.value or b"").split(b"/")) for r in output if r.outcome == "committed")
    halves = [[copies[str(n).encode(), half] for half in HALVES] for n in range(numbers)]
    return Anomalies(
        tuple(n for n, both in enumerate(halves) if max(both) == 0),
        tuple(n for n, both in enumerate(halves) if max(both) > 1),
        tuple(n for n, both in enumerate(halves) if min(both) == 0 < max(both)),
    )


def settled(read: Callable[[], list[LoggedRecord]]) -> list[LoggedRecord]:
    """What `read` gives once no transaction is open in it. Raises AssertionError for a hanging transaction."""
    deadline = time.monotonic() + SETTLES_S
    while True:
        records = read()
        hanging = [record for record in records if record.outcome == "open"]
        if not hanging:
            return records
        assert time.monotonic() < deadline, f"hanging transaction of producer {hanging[0].producer}: {hanging[0]}"
        time.sleep(0.02)
