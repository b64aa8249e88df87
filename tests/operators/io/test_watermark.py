"""The watermark of a source follows the times of the records that it reads."""

from __future__ import annotations

import time
from typing import Any

from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.window import TimestampedValue

from operators.io.elements import Polled, ReceivedRecord, Restored
from operators.io.read_branches import timed


def poll(*times: float) -> Polled:
    records = tuple(ReceivedRecord("prompts", 0, offset, None, int(1000 * at)) for offset, at in enumerate(times))
    return Polled("group", 1, records, (), {}, caught_up=True)


def times_of(*elements: Any) -> list[float | None]:
    """The time of each element that a source emits, None for none; the watermark is the same."""
    watermark, times = ManualWatermarkEstimator(None), []
    for element in elements:
        emitted = timed(element, watermark)
        known = watermark.current_watermark()
        is_timed = isinstance(emitted, TimestampedValue)
        assert (emitted.value if is_timed else emitted) is element
        assert (emitted.timestamp if is_timed else None) == known
        times.append(known and round(known.micros / 1e6, 3))
    return times


def test_watermark_is_the_time_of_the_newest_record() -> None:
    restored = Restored("group", 1, (), {}, {})
    assert times_of(restored, poll(), poll(100.5, 90), poll(), poll(95), poll(200)) == [
        None,
        None,
        100.5,
        100.5,
        100.5,
        200,
    ]


def test_watermark_never_passes_the_present() -> None:
    before = time.time()
    (future,) = times_of(poll(before * 2))
    assert future is not None
    assert before - 0.001 <= future <= time.time() + 0.001
