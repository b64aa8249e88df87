"""Records that decode but are invalid or foreign to the run: each field of every record class at extreme values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from record_samples import SAMPLES

from schemas import records as r
from schemas.codec import decode, encode
from schemas.columns import token_ids
from schemas.shape import fields_of
from schemas.topics import CATALOGUE, LEVEL_REPLY, LEVEL_REQUEST, Topic

FAR = 10**12
"""A prompt number that no run reaches."""
INTEGERS = (-(2**63), -1, 0, 2**31, 2**53 + 1, 2**63 - 1)
TEXTS = ("", "\x1b[2J", "p0.999999", "x" * 5000)
FLOATS = (0.0, -1e300, 1e300, float("inf"), float("nan"))


def invalid_records() -> Iterator[tuple[Topic, Any]]:
    """Every record class on each of its topics: foreign to the run, and with one extreme field at a time."""
    for topic in CATALOGUE.values():
        for kind in topic.record_classes:
            for record in (as_foreign(SAMPLES[kind]), *variants(as_foreign(SAMPLES[kind]))):
                if is_decodable(record):
                    yield topic, record


def foreign_levels() -> Iterator[r.LevelRequest | r.LevelReply]:
    """Plausible requests and replies of another program for the only task, which has three levels."""
    for level in range(3):
        yield r.LevelRequest("", level, 7, 1.0, 64, 0)
        yield from (r.LevelReply("", level, first, 0) for first in (3, 7, FAR))


def level_key(record: r.LevelRequest | r.LevelReply) -> str:
    """The key by which the reader of `record` finds it on the topic `curriculum`."""
    return LEVEL_REQUEST if isinstance(record, r.LevelRequest) else LEVEL_REPLY


def is_decodable(record: Any) -> bool:
    """Whether `record` can be written to a topic; other tests cover undecodable ones."""
    try:
        decode(*encode(record))
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def as_foreign(record: Any) -> Any:
    """`record` with a prompt and a replica that the run does not have."""
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, r.Prompt | r.Trajectory):
            changes[field.name] = as_foreign(value)
    names = {field.name for field in fields(record)}
    for name, value in (("trajectory_id", f"p{FAR}.3"), ("replica", 3), ("run", "run")):
        if name in names:
            changes[name] = value
    if isinstance(record, r.Prompt):
        changes["number"] = FAR
    return replace(record, **changes)


def variants(record: Any) -> Iterator[Any]:
    """`record` with one field at a time, nested ones included, at extreme values."""
    for field in fields_of(type(record)):
        value = getattr(record, field.name)
        if hasattr(value, "__dataclass_fields__"):
            found: Iterator[Any] = variants(value)
        elif field.kind == "tuple":
            found = iter(((), (*value, *value), *((each,) for each in extremes(field.of))))
        elif field.kind == "array":
            found = iter((value.slice(0, 0), token_ids([2**31 - 1, -1]) if field.of == "int32" else value.slice(0, 1)))
        elif field.kind == "mapping":
            found = iter(({}, {"": 0.0}, {"x": 1e300}))
        else:
            found = iter(extremes(field.of))
        for each in found:
            yield replace(record, **{field.name: each})
        if field.optional:
            yield replace(record, **{field.name: None})


def extremes(of: Any) -> tuple[Any, ...]:
    return {int: INTEGERS, str: TEXTS, float: FLOATS, bool: (True, False)}.get(of, ())
