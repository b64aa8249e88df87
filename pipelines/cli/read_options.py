"""The options of the commands that read a topic: offsets, partitions and output format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

import typer

from infra.clocks import wall_ms
from infra.kafka.offset_span import OffsetSpan, parse_span
from infra.kafka.ranges import PartitionRange, resolve_span
from pipelines.cli.options import JsonOption, RunClient, output_form
from pipelines.present.output import Form

FORMS = get_args(Form)
_OFFSETS = (
    "beginning; end; N: from offset N; -N: the last N; +N: without the first N; N:M: from N to before M; @T or @-1h: "
    "from a time; @T1:T2: from T1 to before T2; s@MS, e@MS: kcat's start and end times."
)


@dataclass(frozen=True)
class ReadOptions:
    """Which offsets of which partitions to read, and the output format.

    `-o` is the offset, as in kcat and rpk, and `-O` the output format, as in all commands.
    """

    offset: Annotated[list[str] | None, typer.Option("-o", "--offset", metavar="OFFSET", help=_OFFSETS)] = None
    partitions: Annotated[
        str | None, typer.Option("-p", "--partitions", metavar="0,1", help="Only these partitions.")
    ] = None
    output: Annotated[Form | None, typer.Option("--output", "-O", help="Output format.")] = None
    json: JsonOption = False

    def form(self, otherwise: Form, *, follow: bool = False) -> Form:
        """Return the requested output format. Raises typer.BadParameter for JSON with `follow`."""
        return output_form(self.output, self.json, otherwise, follow)

    @property
    def span(self) -> OffsetSpan | None:
        """The requested offsets; None if -o is not given. Raises typer.BadParameter."""
        if formats := [word for word in self.offset or () if word in FORMS]:
            raise typer.BadParameter(f"-o is the offset; for the output format give -O {formats[0]}", param_hint="-o")
        try:
            return parse_span(self.offset, wall_ms()) if self.offset else None
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="-o") from error

    @property
    def numbers(self) -> list[int] | None:
        """The requested partitions; None for all. Raises typer.BadParameter."""
        try:
            return None if self.partitions is None else [int(part) for part in self.partitions.split(",")]
        except ValueError:
            raise typer.BadParameter(
                f"{self.partitions!r} is not a list of partitions, such as 0,1", param_hint="-p"
            ) from None

    def ranges(self, connection: RunClient, topic: str) -> dict[int, PartitionRange]:
        """Return the offsets to read by partition; `topic` is a full name. Raises typer.BadParameter, UnknownTopic."""
        return resolve_span(connection.client, topic, self.span or OffsetSpan.everything(), self.numbers)
