"""Dead letters for records that were decoded and are invalid."""

from __future__ import annotations

from operators.io.elements import Output, ReceivedRecord
from operators.io.source import MAX_PAYLOAD_BYTES
from schemas.codec import encode
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS


def dead_letter(received: ReceivedRecord, step: str, reason: str, now: int) -> Output:
    """The dead letter with which `step` rejects `received`, at `now` in Unix milliseconds."""
    topic, partition, offset, record, _ = received
    payload = encode(record)[0][:MAX_PAYLOAD_BYTES]
    return Output(DEAD_LETTERS, topic, DeadLetter(step, reason, topic, partition, offset, payload, now))
