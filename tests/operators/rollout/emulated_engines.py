"""Emulated engines on manual clocks."""

from __future__ import annotations

from typing import Any

from operators.rollout.emulated_engine import EmulatedEngine
from operators.rollout.emulation_config import LengthsConfig, RooflineConfig
from operators.rollout.response_lengths import open_lengths
from operators.rollout.roofline import Roofline
from operators.rollout.scheduler import SchedulerConfig

VOCABULARY = 40
CONTEXT = 64
_SHORT = LengthsConfig(p50=12, p99=40)
_DEFAULT = RooflineConfig()


class ManualClock:
    """A clock that the test sets; each reading advances it by `ticks` seconds."""

    def __init__(self, ticks: float = 0.0) -> None:
        self.now, self._ticks = 100.0, ticks

    def __call__(self) -> float:
        self.now += self._ticks
        return self.now


def emulated(
    slots: int = 8,
    context: int = CONTEXT,
    kv_capacity: int | None = None,
    *,
    clock: ManualClock | None = None,
    block: int = 1,
    lengths: LengthsConfig = _SHORT,
    roofline: RooflineConfig = _DEFAULT,
    round_prefill: int | None = None,
    **options: Any,
) -> EmulatedEngine:
    """A small emulated engine; with the default clock about one round passes per reading."""
    capacity = slots * -(-context // block) * block if kv_capacity is None else kv_capacity
    config = SchedulerConfig(slots, context, capacity, VOCABULARY, block=block, round_prefill=round_prefill)
    clock = ManualClock(ticks=0.008) if clock is None else clock
    options = {"status_refresh_s": 0.0, **options}
    return EmulatedEngine(config, Roofline(roofline), open_lengths(lengths), clock=clock, **options)
