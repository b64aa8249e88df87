"""Changes the number of shards of a role between two of its starts, with exactly one owner of each partition.

1. Every old shard is retired: a session of it seals its note. From then on the shard cannot start, so the sealed notes
   are final. All are fenced first: a transaction that one was killed in would hide the ledger that they share.
2. One transaction writes the notes of all new shards: each partition's offset and floor from the note of the old shard
   that had it (the lowest if several read it), and the step's state, divided by `split`.

What was written before is read under the old layout: retiring a shard recovers it as any start does. After an interrupt
the change is repeated. Two processes that change a role at once fence each other, and the second finds it changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError

from infra.kafka.clients import SessionClients
from infra.kafka.fencing import CannotFence, fence
from infra.kafka.note import Note, name_of
from infra.kafka.run_release import NOTE_HEADER
from infra.kafka.session import Session, SessionLost
from infra.kafka.session_config import SessionConfig
from infra.kafka.shard_layout import OtherLayout, layout_of, role_notes, role_prefix
from schemas.codec import encode
from schemas.records import CommitNote

ShardState = Mapping[str, Any]
SplitState = Callable[[Sequence[ShardState], ShardState, int, int], ShardState]
"""The state of a new shard, from the states of all old shards, its own state of before, its number, and the count."""


def reshard(
    sessions: Callable[[int, int], SessionConfig], shards: int, split: SplitState, clients: SessionClients
) -> int | None:
    """Give a role `shards` shards; return the number that it had, None if nothing had to be changed.

    `sessions(shard, shards)` configures a shard's session in a layout. Raises as Session, SessionLost if another
    process changes the layout at the same time, and OtherLayout for a role whose number was fixed until now.
    """
    first = sessions(0, shards)
    coordinator = clients.producer(f"{role_prefix(first.group)}layout", first.transaction_timeout_s)
    try:
        coordinator.init_transactions()
        notes = _notes(clients, first)
        if not notes:
            return None
        before = layout_of(notes)
        _check_not_fixed(first.group, notes, before)
        if before == shards and not any(note.sealed for shard, note in notes.items() if shard < before):
            return None
        old = [sessions(shard, before) for shard in range(before)]
        for config in old:
            fence(clients, config.group)
        starts = [_retire(config, clients) for config in old]
        notes = _notes(clients, first)
        # An earlier change may have sealed the note before.
        if not all(notes[shard].sealed and notes[shard].start == start for shard, start in enumerate(starts)):
            raise KafkaTimeoutError("a sealed note is neither committed nor aborted yet")
        _write(coordinator, clients, _new_notes(sessions, notes, before, shards, split))
    except (KafkaError, CannotFence) as error:
        raise SessionLost(
            f"{role_prefix(first.group)[:-1]}: its number of shards was not changed: {error!r}"
        ) from error
    finally:
        with contextlib.suppress(KafkaError):
            coordinator.close(timeout=1)
    return before


def _check_not_fixed(group: str, notes: Mapping[int, Note], shards: int) -> None:
    """Raise OtherLayout if there are shards beyond the recorded number that no change of it has ended: the notes of a
    role with a fixed number do not record it, and what the others have consumed would be read again."""
    beyond = [shard for shard, note in notes.items() if shard >= shards and not note.sealed]
    if beyond:
        raise OtherLayout(
            f"{role_prefix(group)[:-1]}: its number of shards is fixed, as the run began without max_shards (its last "
            f"commits are of {max(beyond) + 1} shards): set shards and max_shards back"
        )


def _retire(config: SessionConfig, clients: SessionClients) -> int:
    """Seal the note of a shard, from then on its last one; return the number of the start that did."""
    session = Session(replace(config, retires=True), clients)
    session.close()
    return session.start


def _notes(clients: SessionClients, config: SessionConfig) -> dict[int, Note]:
    """The last notes of the role by shard."""
    observer = clients.observer()
    try:
        return role_notes(observer, config.restore, role_prefix(config.group))
    finally:
        observer.close(autocommit=False)


def _new_notes(
    sessions: Callable[[int, int], SessionConfig],
    notes: Mapping[int, Note],
    before: int,
    shards: int,
    split: SplitState,
) -> Iterator[tuple[SessionConfig, Note]]:
    old = [notes[shard] for shard in range(before)]
    for shard in range(shards):
        config, own = sessions(shard, shards), notes.get(shard, Note())
        inputs = {name_of((each.topic, partition)) for each in config.inputs for partition in each.partitions}
        yield (
            config,
            Note(
                own.start,
                _lowest((note.ledger for note in old), {name_of(place) for place in config.ledger}),
                split([note.state for note in old], own.state, shard, shards),
                _lowest((note.offsets for note in old), inputs),
                own.commit,
                _highest([own.written, *(note.written for note in old)]),
                shards,
            ),
        )


def _lowest(offsets: Iterable[Mapping[str, int]], places: set[str]) -> dict[str, int]:
    return {place: offset for place, offset in _merged(offsets, min).items() if place in places}


def _highest(offsets: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return _merged(offsets, max)


def _merged(offsets: Iterable[Mapping[str, int]], choose: Callable[[int, int], int]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for each in offsets:
        for place, offset in each.items():
            merged[place] = choose(offset, merged.get(place, offset))
    return merged


def _write(coordinator: Any, clients: SessionClients, notes: Iterable[tuple[SessionConfig, Note]]) -> None:
    """Write the notes of all new shards in one transaction. Raises KafkaError."""
    made = list(notes)
    restore = made[0][0].restore
    coordinator.begin([TopicPartition(*restore)])
    for config, note in made:
        value, headers = encode(CommitNote(config.group, note.encode(), clients.unix_ms()))
        coordinator.send(restore.topic, value, config.group.encode(), [*headers, NOTE_HEADER], restore.partition)
    coordinator.flush()
    coordinator.commit_transaction()
