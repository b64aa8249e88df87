"""Tickets of the Flight endpoint: which rows of a topic a client requests, and from which offset on.

On the wire a ticket is JSON: `{"topic": "experiences", "where": "reward > 0.5", "from": "-100"}`. `from` is a position
in the notation of kcat and rpk (beginning, end, N, -N, s@TIME), or an offset for each partition, `{"0": 17}`. `until`
has the end offsets; without it, the stream ends at the present end. With `follow` it does not end. The tickets of a
flight's endpoints have both for one partition, so a client can repeat a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from infra.name_lookup import suggest_name
from operators.export.config import Contents
from operators.export.views import SPLITS, Split, ViewName, default_split
from schemas.topics import CATALOGUE

MAX_TICKET_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ticket:
    """A validated request. Raises ValueError if it is invalid."""

    topic: str
    where: str = ""
    view: ViewName = "full"
    start: str | Mapping[int, int] = "beginning"
    until: Mapping[int, int] = field(default_factory=dict)
    follow: bool = False
    split: Split | None = None
    """None: that of the view, see `default_split`."""
    messages: bool = False

    def __post_init__(self) -> None:
        if self.topic not in CATALOGUE:
            raise ValueError(f"there is no topic {self.topic!r}{suggest_name(self.topic, CATALOGUE)}")
        if self.view == "preference":
            raise ValueError("the view preference needs complete files: use `laminar export` instead")
        if self.follow and self.until:
            raise ValueError("give until or follow, not both: a stream with follow has no end")

    def contents(self, run: str, tokenizer: str = "") -> Contents:
        """The contents it requests of `run`. Raises ValueError for a condition or view that its topic does not have."""
        split = self.split or default_split(self.view)
        return Contents(
            run,
            self.topic,
            view=self.view,
            where=self.where,
            split=split,
            messages=self.messages,
            tokenizer=tokenizer,
        )

    def encode(self) -> bytes:
        """The ticket as JSON."""
        values = {("from" if name == "start" else name): value for name, value in asdict(self).items()}
        return json.dumps(values).encode()


def parse_ticket(data: bytes) -> Ticket:
    """The ticket encoded in `data`. Raises ValueError if it is invalid."""
    if len(data) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket must have at most {MAX_TICKET_BYTES} bytes, not {len(data)}")
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'a ticket must be JSON, such as {{"topic": "experiences"}}: {error}') from error
    if not isinstance(request, dict):
        raise ValueError("a ticket must be a JSON object")
    known = {"from" if each.name == "start" else each.name for each in fields(Ticket)}
    for name in request:
        if name not in known:
            raise ValueError(f"a ticket has no {name!r}{suggest_name(name, known)}")
    if "topic" not in request:
        raise ValueError(f"a ticket must have a topic: one of {', '.join(CATALOGUE)}")
    return Ticket(**_validated(request))


def _validated(request: Mapping[str, Any]) -> dict[str, Any]:
    view = request.get("view", "full")
    for name, kind in (("topic", str), ("where", str), ("view", str), ("follow", bool), ("messages", bool)):
        if name in request and not isinstance(request[name], kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {request[name]!r}")
    if view not in get_args(ViewName):
        raise ValueError(f"there is no view {view!r}")
    split = request.get("split")
    if split not in (None, *SPLITS):
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    values = {("start" if name == "from" else name): value for name, value in request.items()}
    if not isinstance(values.get("start", ""), str):
        values["start"] = _offsets("from", values["start"])
    if "until" in values:
        values["until"] = _offsets("until", values["until"])
    return values


def _offsets(name: str, offsets: Any) -> dict[int, int]:
    try:
        found = {int(partition): int(offset) for partition, offset in offsets.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f'{name} must have an offset for each partition, such as {{"0": 17}}, not {offsets!r}'
        ) from None
    if any(partition < 0 or offset < 0 for partition, offset in found.items()):
        raise ValueError(f"{name} has a negative partition or offset")
    return found
