"""The length of an emulated response: a function of seed and trajectory id alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

from infra.arrow_files import DAMAGE, checked, open_parquet_file
from operators.rollout.emulation_config import LengthsConfig
from operators.rollout.random_streams import stream_key

Lengths = Callable[[int, str], int]
"""(seed, trajectory id) → tokens of the response, at least 1."""

_P99 = NormalDist().inv_cdf(0.99)
_UNIT = 2.0**-64


def open_lengths(config: LengthsConfig) -> Lengths:
    """The lengths of `config`. Raises ValueError naming a file that is invalid."""
    return _lengths_of_file(Path(config.file).expanduser()) if config.file else _lognormal(config.p50, config.p99)


def _lognormal(p50: float, p99: float) -> Lengths:
    of = lognormal(p50, p99)
    return lambda seed, trajectory_id: max(1, round(of(_uniform(seed, trajectory_id))))


def lognormal(p50: float, p99: float) -> Callable[[float], float]:
    """The quantile function of a lognormal distribution with this median and 99th percentile."""
    normal = NormalDist(math.log(p50), max(math.log(p99 / p50) / _P99, 1e-12))
    return lambda share: math.exp(normal.inv_cdf(share))


def _lengths_of_file(file: Path) -> Lengths:
    known: dict[str, int] = {}
    drawn: list[int] = []
    for number, row in enumerate(_rows(file), 1):
        length = row.get("length") if isinstance(row, dict) else None
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(f"{file}:{number}: length must be an integer ≥ 1, not {length!r}")
        drawn.append(length)
        if isinstance(name := row.get("trajectory_id"), str):
            known[name] = length
    if not drawn:
        raise ValueError(f"{file} has no lengths")

    def replay(seed: int, trajectory_id: str) -> int:
        length = known.get(trajectory_id)
        return drawn[int(_uniform(seed, trajectory_id) * len(drawn))] if length is None else length

    return replay


def _rows(file: Path) -> Iterator[Any]:
    try:
        if file.suffix == ".parquet":
            parquet = open_parquet_file(file)
            names = set(parquet.schema_arrow.names)
            columns = [name for name in ("length", "trajectory_id") if name in names]
            yield from checked(parquet.read(columns), file).to_pylist()
            return
        with file.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
    except DAMAGE as error:
        raise ValueError(f"cannot read the lengths in {file}: {error}") from error


def _uniform(seed: int, trajectory_id: str) -> float:
    return unit_draw(seed, trajectory_id, "length")


def unit_draw(seed: int, trajectory_id: str, what: str) -> float:
    """One number in (0, 1), from a stream of its own: tokens are drawn from the stream of the plain id."""
    return min((stream_key(seed, f"{trajectory_id}\0{what}") + 0.5) * _UNIT, 1 - 2.0**-53)
