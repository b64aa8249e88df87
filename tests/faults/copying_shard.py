"""A shard like those of the roles, reduced to its transactions: it copies numbers from an input to two outputs.

Each number n becomes the records n/a in partition 0 and n/b in partition 1 of the output, in one transaction with the
offset after n. So the output shows losses, duplicates and torn transactions. It restarts as the roles do: when its
session is lost, it opens another, reads its ledger, and skips the outputs that the ledger has.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.kafka.properties import ClientProperties
from infra.kafka.session import Outgoing, Partition, Session, SessionLost
from infra.kafka.session_config import Input, SessionConfig

NUMBERS_A_TRANSACTION = 2
HALVES = (b"a", b"b")


class CopyingShard:
    """Copies numbers, one session after the other, from partition 0 of `source` to both partitions of `output`."""

    def __init__(self, client: ClientProperties, source: str, output: str) -> None:
        ledger = (Partition(output, 0), Partition(output, 1))
        restore = Partition(f"{output}-restore", 0)
        self.config = SessionConfig(client, output, (Input(source, (0,)),), ledger=ledger, restore=restore)
        self.sessions = 0
        self.commits = 0
        self.copied = 0
        """How many numbers are copied, by acknowledged commits."""
        self.lost: SessionLost | None = None
        self._session: Session | None = None
        self._done: set[bytes] = set()

    def run(self, until: Callable[[], bool], timeout_s: float = 150.0) -> None:
        """Copy until `until` holds after a commit. Raises AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (self._commit_next() and until()):
            assert time.monotonic() < deadline, f"{self.commits} commits, the last session was lost by {self.lost}"

    def close(self) -> None:
        """Close the session; `run` opens another."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _commit_next(self) -> bool:
        """Copy the next numbers in one transaction; False if the session was lost or there were none."""
        try:
            session = self._session = self._session or self._open()
            records = session.poll(0.2)[:NUMBERS_A_TRANSACTION]
            if not records:
                return False
            after = records[-1].offset + 1
            session.seek({self._source: after})
            values = [(half, r.value + b"/" + name) for r in records for half, name in enumerate(HALVES)]
            outputs = [Outgoing(self.config.ledger[h].topic, h, None, v, []) for h, v in values if v not in self._done]
            session.commit(outputs, {self._source: after}, self._ledger, {"next": after})
        except SessionLost as lost:
            self.lost = lost
            self.close()
            return False
        self._done.update(value for _, value in values)
        self.copied = after
        self.commits += 1
        return True

    def _open(self) -> Session:
        session = Session(self.config)
        self.sessions += 1
        self._done = {record.value for record in session.ledger}
        return session

    @property
    def _ledger(self) -> dict[str, int]:
        return {f"{p.topic}:{p.partition}": 0 for p in self.config.ledger}

    @property
    def _source(self) -> Partition:
        return Partition(self.config.inputs[0].topic, self.config.inputs[0].partitions[0])
