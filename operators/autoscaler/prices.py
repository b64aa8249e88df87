"""The price of a rollout process, from a CSV file: a trace that is replayed, or the present price."""

from __future__ import annotations

import csv
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PriceTrace:
    """Prices from the seconds `since` on, in rising order."""

    since: tuple[float, ...]
    prices: tuple[float, ...]

    def at(self, seconds: float) -> float | None:
        """The price at `seconds`; None before the first."""
        place = bisect_right(self.since, seconds) - 1
        return None if place < 0 else self.prices[place]


def parse_prices(text: str, origin: str) -> PriceTrace:
    """The trace in a CSV file with a head. The last row of a file without the column `seconds` is valid at all times.

    Raises ValueError that names `origin`, the row and what is wrong.
    """
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or "price" not in rows[0]:
        raise ValueError(f"{origin} must have the head `seconds,price` or `price`, and a row below it")
    prices = [_number(row, "price", f"{origin}, row {number}") for number, row in enumerate(rows, 2)]
    if "seconds" not in rows[0]:
        return PriceTrace((0.0,), (prices[-1],))
    since = [_number(row, "seconds", f"{origin}, row {number}") for number, row in enumerate(rows, 2)]
    if any(later <= earlier for earlier, later in pairwise(since)):
        raise ValueError(f"{origin}: the seconds must rise from row to row")
    return PriceTrace(tuple(since), tuple(prices))


def _number(row: dict[str, str | None], column: str, where: str) -> float:
    text = row.get(column)
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{where}: {column} is {text!r}, not a number") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{where}: {column} is {text}, not a number from 0 on")
    return value


class Prices:
    """The price in `file` ("": none), a trace or the present price. A trace began `elapsed` seconds ago."""

    def __init__(self, file: str, elapsed: float, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self._began = clock() - elapsed
        self._problem = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the trace began; 0 without a file."""
        return round(self._clock() - self._began, 1) if self._file else 0.0

    def read(self) -> float | None:
        """The price now; None without a file, or if it cannot be read, which is logged once."""
        if not self._file:
            return None
        try:
            trace = parse_prices(Path(self._file).read_text(encoding="utf-8"), self._file)
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("there is no price: %s", error)
            return None
        self._problem = ""
        return trace.at(self._clock() - self._began)
