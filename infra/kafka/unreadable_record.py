"""A record that an observer cannot decode. It does not import kafka-python, for modules that only display it."""

from __future__ import annotations

from typing import NamedTuple


class UnreadableRecord(NamedTuple):
    """The position of the record, by its topic's short name, and the error."""

    short_name: str
    partition: int
    offset: int
    reason: str
