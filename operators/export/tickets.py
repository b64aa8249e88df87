"""What a reader of the Flight endpoint asks for: rows of a topic, some of them, from some offset on.

On the wire it is JSON: `{"topic": "experiences", "where": "reward > 0.5", "from": "-100"}`. `from` is a place as kcat
and rpk have it (beginning, end, N, -N, s@TIME), or an offset for each partition, `{"0": 17}`; `until` gives the ends,
and without it the end is that of now. With `follow` there is no end. A flight's own tickets name both for one
partition, so that a reader may ask again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from infra.name_lookup import suggest_name
from operators.export.config import Contents
from operators.export.views import ViewName
from schemas.topics import CATALOGUE

MAX_TICKET_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ticket:
    """A wish, checked. Raises ValueError where it makes no sense."""

    topic: str
    where: str = ""
    view: ViewName = "full"
    start: str | Mapping[int, int] = "beginning"
    until: Mapping[int, int] = field(default_factory=dict)
    follow: bool = False

    def __post_init__(self) -> None:
        if self.topic not in CATALOGUE:
            raise ValueError(f"there is no topic {self.topic!r}{suggest_name(self.topic, CATALOGUE)}")
        if self.view == "preference":
            raise ValueError("pairs are made of whole files: export the view preference instead")
        if self.follow and self.until:
            raise ValueError("what follows has no end: give until or follow, not both")

    def contents(self, run: str) -> Contents:
        """What its rows are, in `run`. Raises ValueError for a condition or a view that its topic has not."""
        return Contents(run, self.topic, view=self.view, where=self.where)

    def encode(self) -> bytes:
        """As it travels."""
        said = {("from" if name == "start" else name): value for name, value in asdict(self).items()}
        return json.dumps(said).encode()


def parse_ticket(data: bytes) -> Ticket:
    """The ticket that travels as `data`. Raises ValueError that says what is wrong with it."""
    if len(data) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket of {len(data)} bytes is over {MAX_TICKET_BYTES}")
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'a ticket is JSON, as {{"topic": "experiences"}}: {error}') from error
    if not isinstance(said, dict):
        raise ValueError("a ticket is a JSON object")
    known = {"from" if each.name == "start" else each.name for each in fields(Ticket)}
    for name in said:
        if name not in known:
            raise ValueError(f"a ticket has no {name!r}{suggest_name(name, known)}")
    if "topic" not in said:
        raise ValueError(f"a ticket names a topic: one of {', '.join(CATALOGUE)}")
    return Ticket(**_typed(said))


def _typed(said: Mapping[str, Any]) -> dict[str, Any]:
    start = said.get("from", "beginning")
    view = said.get("view", "full")
    for name, kind in (("topic", str), ("where", str), ("view", str), ("follow", bool)):
        if name in said and not isinstance(said[name], kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {said[name]!r}")
    if view not in ("full", "trl", "sft", "verl", "preference"):
        raise ValueError(f"there is no view {view!r}")
    return {
        "topic": said["topic"],
        "where": said.get("where", ""),
        "view": view,
        "start": start if isinstance(start, str) else _offsets("from", start),
        "until": _offsets("until", said.get("until", {})),
        "follow": said.get("follow", False),
    }


def _offsets(name: str, said: Any) -> dict[int, int]:
    try:
        found = {int(partition): int(offset) for partition, offset in said.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f'{name} must be an offset by partition, as {{"0": 17}}, not {said!r}') from None
    if any(partition < 0 or offset < 0 for partition, offset in found.items()):
        raise ValueError(f"{name} has a number below 0")
    return found
