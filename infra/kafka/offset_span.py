"""Offset spans: where to begin and end reading, in the notations of kcat and rpk.

beginning, start, end      an edge of each partition
N, -N, +N                  offset N; the last N of each partition; all but its first N
N:M, N:, :M, :end          from the first to before the second
s@MS, e@MS                 from, or to before, a Unix time in milliseconds; give two for both
@T, @T1:T2, @-1h           times: Unix milliseconds, ISO 8601 (UTC by default), or a duration ago
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

_AGO = re.compile(r"(\d{1,9})(ms|s|m|h|d)")
_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_COUNT = re.compile(r"([+-]?)(\d{1,18})")
_EDGES = {"beginning": "beginning", "start": "beginning", "earliest": "beginning", "end": "end", "latest": "end"}


class Edge(NamedTuple):
    """An offset, one counted from an edge of the partition, or the first one at a Unix time in milliseconds."""

    of: Literal["offset", "beginning", "end", "time"]
    number: int

    def within(self, beginning: int, end: int, at_time: int | None = None) -> int:
        """The offset in a partition with offsets `beginning` to before `end`; `at_time` is the offset of the time."""
        wanted = {
            "offset": self.number,
            "beginning": beginning + self.number,
            "end": end - self.number,
            "time": end if at_time is None else at_time,
        }[self.of]
        return max(beginning, min(wanted, end))

    def is_before(self, offset: int) -> bool:
        """Whether this is an offset, not 0 (the beginning), and lies before `offset`, the first one to be read."""
        return self.of == "offset" and 0 < self.number < offset


class OffsetSpan(NamedTuple):
    """A span of offsets: from `first` to before `last`, or to the end if `last` is None."""

    first: Edge
    last: Edge | None

    @classmethod
    def everything(cls) -> OffsetSpan:
        """The whole partition."""
        return cls(Edge("beginning", 0), None)


def parse_span(texts: Sequence[str], now_ms: int) -> OffsetSpan:
    """The span given by one text, or by two of kcat's times. Raises ValueError."""
    first: Edge | None = None
    last: Edge | None = None
    for text in texts:
        begins, ends = _one(text, now_ms)
        if (begins and first) or (ends and last):
            raise ValueError(f"{text!r}: the beginning, or the end, is given twice")
        first, last = begins or first, ends or last
    return OffsetSpan(first or Edge("beginning", 0), last)


def parse_time(text: str, now_ms: int) -> int:
    """A time in Unix milliseconds: given so, as a duration ago such as `2h` (ms, s, m, h, d), or in ISO 8601 (default
    UTC).

    Raises ValueError.
    """
    if (ago := _AGO.fullmatch(text)) is not None:
        return now_ms - int(ago[1]) * _MS[ago[2]]
    if text.isdigit() and len(text) >= 12:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: give 2026-01-31T12:00, Unix milliseconds, or 2h (ago)") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _one(text: str, now_ms: int) -> tuple[Edge | None, Edge | None]:
    if text[:2] in ("s@", "e@"):
        edge = Edge("time", parse_time(text[2:], now_ms))
        return (edge, None) if text[0] == "s" else (None, edge)
    if text.startswith("@"):
        return _times(text, now_ms)
    begins, _, ends = text.partition(":")
    if not (begins or ends):
        raise ValueError(_invalid(text))
    return (_edge(begins, text) if begins else None, _edge(ends, text) if ends else None)


def _times(text: str, now_ms: int) -> tuple[Edge | None, Edge | None]:
    """ISO times contain colons too: the first valid split counts."""
    times = text[1:]
    splits = [(times, "")] + [(times[:at], times[at + 1 :]) for at, letter in enumerate(times) if letter == ":"]
    for begins, ends in splits:
        try:
            first = Edge("time", _moment(begins, now_ms)) if begins else None
            last = Edge("end", 0) if ends == "end" else Edge("time", _moment(ends, now_ms)) if ends else None
        except ValueError:
            continue
        if first or last:
            return first, last
    raise ValueError(_invalid(text))


def _moment(text: str, now_ms: int) -> int:
    return parse_time(text.removeprefix("-"), now_ms)


def _edge(text: str, whole: str) -> Edge:
    if text in _EDGES:
        return Edge(_EDGES[text], 0)  # type: ignore[arg-type]
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ValueError(_invalid(whole))
    return Edge({"": "offset", "+": "beginning", "-": "end"}[found[1]], int(found[2]))  # type: ignore[arg-type]


def _invalid(text: str) -> str:
    return f"{text!r} is not an offset: give beginning, end, N, -N, +N, N:M, s@MS, e@MS, @2026-01-31, @-1h or @T1:T2"
