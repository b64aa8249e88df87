"""Planted defects of sessions, commits and the cluster.

Producers that do not fence, repeated ends of transactions and reads of uncommitted records are planted in the simulated
clients: `infra/kafka/transactions.py` and kafka-python run in no history, tests/infra/simulation compares them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infra.kafka import resharding
from infra.kafka.note import Note
from infra.kafka.session import Session
from infra.kafka.simulated_consumer import SimulatedConsumer
from infra.kafka.simulated_producer import SimulatedProducer, resend
from infra.simulation.cluster import SimulatedCluster
from infra.simulation.partition import ProducerKey
from operators.io.commits import ShardCommits
from operators.io.ledger import TrajectoryLedger


def note_offsets_are_lost(patch: pytest.MonkeyPatch) -> None:
    """A start forgets where it was: it reads every input from the beginning, and no ledger protects score."""
    decode = Note.decode
    patch.setattr(Note, "decode", lambda text: replace(decode(text), offsets={}))
    patch.setattr(TrajectoryLedger, "add", lambda self, key, size, emission: True)


def note_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A start finds no note, so start numbers repeat."""
    patch.setattr("infra.kafka.session.last_note", lambda *args, **options: None)
    patch.setattr(Session, "_check_first_start", lambda *args: None)


def start_reads_from_any_broker(patch: pytest.MonkeyPatch) -> None:
    """A start takes the note of a broker that is cut off from the others for the last one."""
    patch.setattr("infra.kafka.session.check_present", lambda *args: None)


def note_of_an_aborted_transaction_counts(patch: pytest.MonkeyPatch) -> None:
    """A start takes the last note in the log, whether or not it was committed."""
    from infra.kafka import note

    class AlwaysCommitted:
        def __init__(self, marker: Any) -> None:
            self.producer_id, self.committed = marker.producer_id, True

    read = note.read_to_end
    patch.setattr(note, "Marker", AlwaysCommitted)

    def committed(*args: Any) -> Any:
        for each in read(*args):
            yield AlwaysCommitted(each) if hasattr(each, "committed") else each

    patch.setattr(note, "read_to_end", committed)


def start_number_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    """A session uses its start number before it is in a note."""
    commit = Session.commit

    def changed(self: Session, outputs: Any, *rest: Any) -> Any:
        if self.commits == 0 and not outputs and not getattr(self, "_mutated", False):
            self._mutated = True  # type: ignore[attr-defined]
            return {}
        return commit(self, outputs, *rest)

    patch.setattr(Session, "commit", changed)


def outputs_are_committed_before_the_note(patch: pytest.MonkeyPatch) -> None:
    """Outputs and note are two transactions."""
    write = Session._write

    def changed(self: Session, outputs: Any, note: Note, sent: list[Any], last: bool, due: bool = True) -> Any:
        if not outputs:
            return write(self, outputs, note, sent, last, due)
        first = _write_outputs(self, outputs, sent)
        write(self, [], note, [], last)
        return first

    patch.setattr(Session, "_write", changed)


def note_is_committed_before_the_outputs(patch: pytest.MonkeyPatch) -> None:
    """Note and outputs are two transactions, the note first: the outputs are lost between them."""
    write = Session._write

    def changed(self: Session, outputs: Any, note: Note, sent: list[Any], last: bool, due: bool = True) -> Any:
        write(self, [], note, [], last)
        return _write_outputs(self, outputs, sent) if outputs else {}

    patch.setattr(Session, "_write", changed)


def _write_outputs(session: Session, outputs: Any, sent: list[Any]) -> dict[str, int]:
    """Write outputs in a transaction of their own; the first offset of each partition."""
    session._producer.begin([])
    for o in outputs:
        sent.append(session._producer.send(o.topic, o.value, o.key, list(o.headers), o.partition))
    session._producer.commit_transaction()
    first: dict[str, int] = {}
    for written in [each.get(timeout=0) for each in sent]:
        first.setdefault(f"{written.topic}:{written.partition}", written.offset)
    return first


def consumers_read_uncommitted_records(patch: pytest.MonkeyPatch) -> None:
    """Inputs are read with open and aborted transactions."""
    patch.setattr(SimulatedConsumer, "committed", False)


def unknown_outcome_is_retried(patch: pytest.MonkeyPatch) -> None:
    """After a commit of unknown outcome the same emissions are written again in the next session's transaction."""
    commit = ShardCommits.commit

    def changed(self: ShardCommits, emissions: Any) -> None:
        kept = getattr(self, "_kept", [])
        session = self._sessions.get(self._config.group)
        if kept and session is not None and session.lost is None:
            again = [replace(each, start=session.start, number=n + 1) for n, each in enumerate(kept)]
            emissions = [*again, *(replace(e, number=e.number + len(kept)) for e in emissions)]
            self._kept = []  # type: ignore[attr-defined]
        try:
            commit(self, emissions)
        except Exception:
            self._kept = list(emissions)  # type: ignore[attr-defined]
            raise

    patch.setattr(ShardCommits, "commit", changed)


def producer_does_not_fence(patch: pytest.MonkeyPatch) -> None:
    """A new producer keeps the epoch of its predecessor, which may go on."""
    init = SimulatedCluster.init_producer_id

    def changed(self: SimulatedCluster, transactional_id: str, timeout_s: float = 60.0) -> ProducerKey:
        found = self._transactions.get(transactional_id)
        if found is None or found.state == "ongoing":
            return init(self, transactional_id, timeout_s)
        return ProducerKey(found.producer_id, found.epoch)

    patch.setattr(SimulatedCluster, "init_producer_id", changed)
    patch.setattr("infra.simulation.partition._check_sequence", lambda *args: None)
    patch.setattr("infra.simulation.partition._repeated", lambda *args: None)


def end_of_a_transaction_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    """EndTxn is sent again after a broken connection: the first one may arrive late, in a later transaction."""

    def changed(self: SimulatedProducer) -> None:
        self.flush()
        resend(self._connection, "EndTxn", lambda: self._cluster.end_transaction(self._id, self._producer, commit=True))
        self._deadline = 0.0

    patch.setattr(SimulatedProducer, "commit_transaction", changed)


def new_shards_read_from_the_farthest_position(patch: pytest.MonkeyPatch) -> None:
    """Where several old shards read a partition, the new ones begin at the highest of their positions."""
    merged = resharding._merged
    patch.setattr(resharding, "_merged", lambda offsets, choose: merged(offsets, max))


LOG_MUTATIONS = (
    note_offsets_are_lost,
    note_is_lost,
    start_reads_from_any_broker,
    note_of_an_aborted_transaction_counts,
    start_number_is_not_committed,
    outputs_are_committed_before_the_note,
    note_is_committed_before_the_outputs,
    consumers_read_uncommitted_records,
    unknown_outcome_is_retried,
    producer_does_not_fence,
    end_of_a_transaction_is_sent_again,
    new_shards_read_from_the_farthest_position,
)
