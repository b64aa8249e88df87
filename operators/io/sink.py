"""A shard's sink, with group commit: emissions that arrive during one transaction are committed together in the next.

The step never waits for Kafka, and a busy shard makes few, large transactions. Emissions without outputs wait for the
next one with outputs, for a moment at most. This file has the queue and its thread; `commits.py` has the transactions.
"""

from __future__ import annotations

import logging
import threading
import time

from infra.kafka.log_gaps import CannotResume
from infra.kafka.session import SessionLost
from infra.kafka.sessions import SESSIONS
from infra.runners.liveness import LIVENESS
from operators.io.commits import ShardCommits
from operators.io.config import ShardConfig, opened_for
from operators.io.elements import Emission

log = logging.getLogger(__name__)

MAX_EMISSIONS = 64
"""Emissions that may wait for a transaction; beyond it the step blocks."""
MAX_OUTPUTS = 1024
"""Outputs that may wait for a transaction; beyond it the step blocks."""
QUIET_S = 0.5
"""How long emissions without outputs may wait for others: most come from idle polls, and nothing is due for them."""
MAX_QUIET = MAX_EMISSIONS // 2
"""So many emissions are committed at once, with outputs or without."""
STUCK_S = 180.0
"""Added to the transaction time-out; a transaction that has not ended by then counts as stuck."""


class SinkBroken(RuntimeError):
    """Emissions cannot be written, and a retry would not help."""


class ShardSink:
    """Commits the emissions of one shard in its own thread. There is one per process and shard."""

    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self.broken: SinkBroken | CannotResume | None = None
        self._waiting: list[Emission] = []
        self._outputs = 0
        self._due = False
        """Whether the thread should take what waits at once."""
        self._changed = threading.Condition()
        self._idle = True
        self._closed = False
        self._commits = ShardCommits(config, SESSIONS)
        self._bytes_taken = 0
        self._stuck_s = STUCK_S + config.transaction_timeout_s
        LIVENESS.start_thread(f"sink {config.group}", self._run)

    def write(self, emission: Emission) -> None:
        """Queue `emission`; it is durable after `flush`. Blocks while the queue is full.

        Raises SinkBroken, and CannotResume if no retry of the role would help.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, self._stuck_s):
                self._break(f"a transaction has not ended in {self._stuck_s:g} s")
            if self.broken is not None:
                raise self.broken
            self._waiting.append(emission)
            self._outputs += len(emission.outputs)
            if emission.outputs or emission.last or len(self._waiting) >= MAX_QUIET:
                self._wake()

    @property
    def waiting(self) -> int:
        """Outputs that wait for the end of the transaction under way."""
        with self._changed:
            return self._outputs

    def take_bytes(self) -> int:
        """Bytes of the records committed since the last call."""
        written, before = self._commits.bytes_committed, self._bytes_taken
        self._bytes_taken = written
        return written - before

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once all queued emissions are committed, or dropped with a lost session. Raises as `write`."""
        timeout_s = self._stuck_s if timeout_s is None else timeout_s
        with self._changed:
            if self._waiting:
                self._wake()
            if not self._changed.wait_for(self._is_done, timeout_s):
                self._break(f"a transaction has not ended in {timeout_s:g} s")
            if self.broken is not None:
                raise self.broken

    def close(self) -> None:
        """End the thread after its current transaction."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        self._due = True
        self._changed.notify_all()

    def _has_room(self) -> bool:
        fits = len(self._waiting) < MAX_EMISSIONS and self._outputs < MAX_OUTPUTS
        return fits or self.broken is not None

    def _is_done(self) -> bool:
        return (self._idle and not self._waiting) or self.broken is not None

    def _break(self, why: object) -> None:
        """Reject further emissions, and end the session: later emissions would leave a gap in its output."""
        self.broken = why if isinstance(why, CannotResume) else SinkBroken(f"{self.config.group}: {why}")
        session = SESSIONS.get(self.config.group)
        if session is not None and session.lost is None:
            session.lost = SessionLost(str(self.broken))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed, QUIET_S)
                if self.broken is not None or (self._closed and not self._waiting):
                    return
                if not self._waiting:
                    continue
                emissions, self._waiting, self._outputs, self._due = self._waiting, [], 0, False
                self._idle = False
                self._changed.notify_all()
            try:
                self._commits.commit(emissions)
            except SessionLost as lost:
                log.warning("%s", lost)  # the source detects it and opens a new session
            except BaseException as error:
                log.exception("%s: the sink is broken", self.config.group)
                with self._changed:
                    self._break(error if isinstance(error, CannotResume) else repr(error))
            with self._changed:
                self._idle = True
                self._changed.notify_all()


_SINKS: dict[str, ShardSink] = {}


def sink_of(config: ShardConfig) -> ShardSink:
    """The sink of `config`'s shard in this process."""
    return opened_for(config, _SINKS, ShardSink)


def drop_sink(group: str) -> None:
    """Close the sink of `group`; the next use creates another."""
    sink = _SINKS.pop(group, None)
    if sink is not None:
        sink.close()


def close_sinks() -> None:
    """Commit the queue of every sink of this process within 3 seconds, and close the sinks."""
    deadline = time.monotonic() + 3.0
    for sink in list(_SINKS.values()):
        try:
            sink.flush(max(0.0, deadline - time.monotonic()))
        except (SinkBroken, CannotResume) as broken:
            log.warning("emissions were not committed; the next start produces them again: %s", broken)
        drop_sink(sink.config.group)
