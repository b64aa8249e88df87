"""The times of a source's elements, and its watermark: that of the newest record so far."""

from __future__ import annotations

import time

import apache_beam as beam
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from operators.io.elements import Polled, Restored

WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())
"""The default of the parameter of `process` that `timed` takes."""


def timed(element: Restored | Polled, watermark: ManualWatermarkEstimator) -> Restored | Polled | TimestampedValue:
    """`element` at the time of the newest record so far, to which the watermark moves.

    So a runner's interface shows how far behind a shard is. No step depends on it: records of different topics are not
    in the order of their times. A time in the future, which other machines may write, counts as now.
    """
    known = watermark.current_watermark()
    if isinstance(element, Polled) and element.records:
        newest = min(max(record.timestamp for record in element.records) / 1000, time.time())
        if known is None or known < newest:
            known = Timestamp.of(newest)
            watermark.set_watermark(known)
    return element if known is None else TimestampedValue(element, known)
