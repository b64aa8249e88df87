"""Outputs of a transaction as Kafka records: outputs of one class become rows of one record, by key or by purpose.

Each record costs its readers and writers about a millisecond of CPU time, whatever its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from infra.kafka.session import Outgoing
from operators.io.elements import Output
from schemas.block import Block
from schemas.block_codec import encode_block
from schemas.codec import Headers, encode_all, record_type
from schemas.topics import Topic, run_of
from schemas.tracing import TRACEPARENT, traceparent

_PROMPT_KEYS = ("prompt_id", "group_id")
_MERGED_KEY = "group_id"
"""Outputs of a topic with this key are rows of one record, under the key of the first, if their purpose is the same."""
_ID_FIELDS = ("trajectory_id", "trajectory_ids")


def coalesce(outputs: Iterable[Output], name_of: Callable[[Topic], str]) -> list[Outgoing]:
    """Encode `outputs`, in order within each topic, partition and key (or purpose); `name_of` returns a topic's full
    name.

    Consecutive outputs of one class become rows of one record where their encoding allows, and so do consecutive
    blocks. A record of a prompt carries the prompt's trace (W3C traceparent); a record of several prompts carries that
    of the first. Raises ValueError for an output that is too large or does not fit its schema, or whose topic is not
    transactional; KeyError for a class that is not a record.
    """
    runs: list[tuple[Topic, int | None, str, list[Any]]] = []
    last: dict[tuple[str, int | None, str], list[Any]] = {}
    for topic, key, record, partition in outputs:
        if not topic.transactional:
            raise ValueError(f"topic {topic.short_name} is not transactional: write to it with a plain producer")
        stream = (topic.short_name, partition, _merged_by(topic, key))
        run = last.get(stream)
        if run is not None and _fits_one_record(run[0], record):
            run.append(record)
        else:
            last[stream] = run = [record]
            runs.append((topic, partition, key, run))
    return [
        Outgoing(name, partition, key.encode() or None, value, (*headers, *trace))
        for topic, partition, key, run in runs
        for name, trace in [_name_and_trace(name_of(topic), topic, key or None, run[0])]
        for value, headers in _encoded(run)
    ]


def _merged_by(topic: Topic, key: str) -> str:
    """What outputs of one record share: the key, or the purpose, which is the first letter of a group's id."""
    return key[:1] if topic.key == _MERGED_KEY else key


def _name_and_trace(name: str, topic: Topic, key: str | None, first: Any) -> tuple[str, Headers]:
    """The full name of a topic, and the trace headers of a record with `key` whose first row is `first`."""
    group = key if topic.key in _PROMPT_KEYS else _group_of(first)
    run = run_of(name) if group else None
    return name, ((TRACEPARENT, traceparent(run, group, topic.short_name)),) if run and group else ()


def _group_of(record: Any) -> str | None:
    """The group of the first trajectory that a record, or the first row of a block, names."""
    if isinstance(record, Block):
        ids = {
            name: record.column(name)[0].as_py()
            for name in _ID_FIELDS
            if len(record) and name in record.batch.schema.names
        }
    else:
        ids = {name: getattr(record, name) for name in _ID_FIELDS if hasattr(record, name)}
    first = ids.get("trajectory_id") or next(iter(ids.get("trajectory_ids") or ()), "")
    return first.partition(".")[0] or None


def _fits_one_record(first: Any, record: Any) -> bool:
    """Whether both may be rows of one record."""
    if isinstance(first, Block) and isinstance(record, Block):
        return first.kind is record.kind and record_type(first.kind).rows
    return type(first) is type(record) and record_type(type(record)).rows


def _encoded(run: Sequence[Any]) -> Iterator[tuple[bytes, Headers]]:
    return encode_block(Block.concat(run)) if isinstance(run[0], Block) else encode_all(run)
