"""The bounds of settings: of objects that code makes. tests/pipelines/test_config.py has those of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any, Literal

import pytest

from infra.setting_types import (
    CheckedSettings,
    FiniteNonNegative,
    NonNegative,
    Port,
    Positive,
    PositiveInt,
    PositiveShare,
    Seed,
)


@dataclass(frozen=True, slots=True)
class Sample(CheckedSettings):
    count: PositiveInt = 1
    share: PositiveShare = 1.0
    period_s: Positive | None = None
    delay_s: FiniteNonNegative = 0.0
    port: Port = 0
    seed: Seed = 0
    waits_s: tuple[NonNegative, ...] = (0.0, inf)
    of_role: Mapping[str, PositiveInt] = field(default_factory=dict)
    order: Literal["up", "down"] | None = None

    def _check(self) -> None:
        if self.count > self.port > 0:
            raise ValueError("count must be at most port")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"share": 0.0}, "share must be positive, not 0.0"),
        ({"share": 1.5}, "share must be at most 1, not 1.5"),
        ({"share": nan}, "share must be positive, not nan"),
        ({"period_s": 0.0}, "period_s must be positive, not 0.0"),
        ({"delay_s": inf}, "delay_s must be finite, not inf"),
        ({"port": 65536}, "port must be at most 65535, not 65536"),
        ({"seed": 2**29}, "seed must be below 536870912, not 536870912"),
        ({"waits_s": (1.0, -1.0)}, "waits_s must be at least 0, not -1.0"),
        ({"of_role": {"score": 0}}, "of_role.score must be at least 1, not 0"),
        ({"order": "left"}, "order must be one of up, down, not 'left'"),
        ({"count": 3, "port": 2}, "count must be at most port"),
    ],
)
def test_settings_name_a_value_beyond_its_bounds(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        replace(Sample(), **values)
    assert str(caught.value) == message


def test_settings_accept_the_bounds_themselves() -> None:
    Sample(count=1, share=1.0, period_s=inf, delay_s=0.0, port=65535, seed=2**29 - 1, order="up", of_role={"a": 1})
