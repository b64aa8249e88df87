"""What of a topic a command reads, and how it prints that: the options that tail, find and stats share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import typer

from infra.kafka.offset_span import OffsetSpan, parse_span
from infra.kafka.ranges import PartitionRange, resolve_span
from pipelines.cli.options import Connection, JsonOption
from pipelines.present.output import Form

FORMS = get_args(Form)
_OFFSETS = "N, -N, +N, N:M, beginning, end, s@MS, e@MS, @-1h, @T1:T2; or a form, as in --output."


@dataclass(frozen=True)
class ReadOptions:
    """From where to where, which partitions, and in which form.

    `-o` takes both what kcat's and rpk's users mean by it and what those of other tools do: no offset is a form.
    """

    offset: Annotated[list[str] | None, typer.Option("-o", "--offset", metavar="OFFSET", help=_OFFSETS)] = None
    partitions: Annotated[
        str | None, typer.Option("-p", "--partitions", metavar="0,1", help="Only these partitions.")
    ] = None
    output: Annotated[Form | None, typer.Option("--output", "-O", help="How it is printed.")] = None
    json: JsonOption = False

    def form(self, otherwise: Form, json: Form = "jsonl") -> Form:
        """The form that is asked for; `json` is what --json stands for."""
        said: list[Any] = [word for word in self.offset or () if word in FORMS]
        return self.output or (said[-1] if said else json if self.json else otherwise)

    @property
    def span(self) -> OffsetSpan | None:
        """What is to be read; None where nothing is said of it. Raises typer.BadParameter."""
        said = [word for word in self.offset or () if word not in FORMS]
        try:
            return parse_span(said, time.time_ns() // 1_000_000) if said else None
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="-o") from error

    @property
    def numbers(self) -> list[int] | None:
        """The partitions; None for all. Raises typer.BadParameter."""
        try:
            return None if self.partitions is None else [int(part) for part in self.partitions.split(",")]
        except ValueError:
            raise typer.BadParameter(
                f"{self.partitions!r} is no list of partitions, like 0,1", param_hint="-p"
            ) from None

    def ranges(self, to: Connection, topic: str) -> dict[int, PartitionRange]:
        """What that is in each partition of `topic`, by its full name. Raises typer.BadParameter, UnknownTopic."""
        return resolve_span(to.client, topic, self.span or OffsetSpan.everything(), self.numbers)
