"""A record that an observer cannot make sense of. Free of the client, for those who only show it."""

from __future__ import annotations

from typing import NamedTuple


class UnreadableRecord(NamedTuple):
    """Where it stands, by its topic's noun, and why it cannot be read."""

    short_name: str
    partition: int
    offset: int
    reason: str
