"""Keeps `metrics.jsonl` small: of values that are sampled at any time, older ones are kept at longer intervals.

Values of a batch, a version or a phase are all kept. In weeks, samples of a hundred replicas would be gigabytes, which
everything that reads the file reads whole.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import orjson

from infra.files import replacing
from schemas.topics import STEP_COUNTERS

FIRST_INTERVAL_MS = 4_000
"""The shortest interval of thinned samples; replicas are sampled every 2 s."""
LAST_INTERVAL_MS = 1 << 40
"""An interval longer than any run."""


def thin_samples(path: Path, names: Collection[str], max_bytes: int, recent_bytes: int) -> None:
    """Thin all samples before the last `recent_bytes` of the file evenly, until they have at most `max_bytes`.

    Samples are the metrics `names`, whose step is a replica or a process, and the counters of roles. Of a process that
    has started again, the last counts of the earlier start may be those of an interval before its end. Readers see the
    old file or the new one. Raises OSError.
    """
    interval_ms = FIRST_INTERVAL_MS
    while (left := _thin(path, names, interval_ms, recent_bytes)) > max_bytes and interval_ms < LAST_INTERVAL_MS:
        interval_ms <<= (left // max_bytes).bit_length()


def _thin(path: Path, names: Collection[str], interval_ms: int, recent_bytes: int) -> int:
    """Keep one sample of a series in each interval; return the bytes of the samples that are left."""
    newest: dict[tuple[str, int], int] = {}
    left, until = 0, path.stat().st_size - recent_bytes
    with path.open("rb") as lines, replacing(path) as out:
        read = 0
        for line in lines:
            read += len(line)
            if read <= until and (sample := _sample(line, names)) is not None:
                series, at = sample
                if 0 <= at - newest.get(series, -interval_ms) < interval_ms:
                    continue
                newest[series] = at
                left += len(line)
            out.buffer.write(line)
    return left


def _sample(line: bytes, names: Collection[str]) -> tuple[tuple[str, int], int] | None:
    """The series of a sample, a metric and its step, and when it was measured; None for another line."""
    try:
        metric = orjson.loads(line)
        name, series = metric["name"], (metric["name"], metric["step"])
        return (series, metric["measured_at"]) if name in names or name.startswith(STEP_COUNTERS) else None
    except (ValueError, TypeError, KeyError):
        return None
