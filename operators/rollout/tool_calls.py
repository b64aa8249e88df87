"""The tool calls of an emulated response, such as programs that it runs: a function of seed and trajectory id alone."""

from __future__ import annotations

from typing import NamedTuple

from operators.rollout.emulation_config import ToolsEmulation
from operators.rollout.response_lengths import lognormal, unit_draw


class ToolCall(NamedTuple):
    """A call after `tokens` response tokens, which takes `seconds` emulated seconds."""

    tokens: int
    seconds: float


def open_tools(config: ToolsEmulation) -> ToolCalls | None:
    """The calls of `config`; None if there are none."""
    return ToolCalls(config) if config.most_calls else None


class ToolCalls:
    """The calls of responses: 1 to `most_calls` of each, at equal distances, of limited lognormal duration."""

    def __init__(self, config: ToolsEmulation) -> None:
        self._most, self._durations = config.most_calls, lognormal(config.p50_s, config.p99_s)
        self._limit_s = config.limit_s

    def of(self, seed: int, trajectory_id: str, length: int) -> list[ToolCall]:
        """The calls of a response of `length` tokens, in order."""
        calls = 1 + int(unit_draw(seed, trajectory_id, "calls") * self._most)
        places = sorted({length * number // (calls + 1) for number in range(1, calls + 1)} - {0})
        drawn = (self._durations(unit_draw(seed, trajectory_id, f"call {at}")) for at in places)
        return [ToolCall(at, min(seconds, self._limit_s)) for at, seconds in zip(places, drawn, strict=True)]
