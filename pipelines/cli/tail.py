"""`laminar topics tail` and `get`: records as they stand in a topic, decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.ranges import PartitionRange, partition_ranges, resolve_span
from infra.kafka.reading import last_records, undecoded
from pipelines.cli.options import Address
from pipelines.cli.read_options import ReadOptions
from pipelines.cli.topic_names import TopicArgument, known_topic
from pipelines.inspect.log.chunks import chunks_of, read_chunks
from pipelines.present.kcat_format import envelope, formatter
from pipelines.present.output import Report, RowOutput
from pipelines.present.record_text import TAIL_COLUMNS, TAIL_SCHEMA, as_items, as_line, as_rows

_PLACE = re.compile(r"(\d{1,9}):(\d{1,18})")


def tail_command(
    topic: TopicArgument,
    reading: ReadOptions,
    address: Address,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=0, help="So many records; without -o the last ones, 10 by default."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes.")] = False,
    form: Annotated[
        str | None,
        typer.Option("-f", "--format", metavar="FORMAT", help="kcat's: %t %p %o %k %s %S %K %h %T; %s is decoded."),
    ] = None,
    kcat: Annotated[bool, typer.Option("-J", help="kcat's JSON envelope.")] = False,
) -> RowOutput:
    """Print records of a topic, decoded; those that cannot be are shown as such. Joins no group, commits nothing.

    With --follow and without an offset, it begins with the last ones of each partition. Where they apply, each row is
    told with its trajectory, version, staleness, reward, tokens and lease; these are the columns of a table, too.

    \b
    Examples:
      laminar topics tail trajectories
      laminar topics tail settled -n 100 --json | jq .rows[].outcome
      laminar topics tail inbox -p 0 -o beginning -n 5 -o table
      laminar topics tail settled -o @-1h -f '%p:%o %k %s'
      laminar topics tail metrics --follow
    """
    try:
        line = as_line if form is None else formatter(form)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="-f") from error
    span, numbers = reading.span, reading.numbers
    to = address.connect()
    name, known = known_topic(topic, to.run)
    if span is not None or follow:
        last = OffsetSpan(Edge("end", 10 if count is None else count), None)
        ranges = resolve_span(to.client, name, span or last, numbers)
        items = _cut(
            (list(as_items(chunk, name)) for chunk in read_chunks(to.client, known, name, ranges, follow=follow)),
            count if span is not None else None,
        )
    else:
        found = last_records(to.client, name, 10 if count is None else count, numbers, decoder=undecoded)
        items = (list(as_items(chunk, name)) for chunk in chunks_of(known, found))
    kind = "jsonl" if kcat else reading.form("lines")
    if kcat:
        items = ([envelope(item) for item in part] for part in items)
    elif kind in ("table", "csv", "csv-raw", "arrow"):
        items = ([row for item in part for row in as_rows(item)] for part in items)
    return RowOutput(items, TAIL_COLUMNS, kind, f"{name} has no such records", line, schema=TAIL_SCHEMA)


def _cut(parts: Iterable[list[Any]], count: int | None) -> Iterator[list[Any]]:
    """`parts` up to `count` items in all."""
    left = count
    for part in parts:
        yield part[:left]
        if left is not None and (left := left - len(part)) <= 0:
            return


def get_command(
    address: Address,
    topic: TopicArgument,
    place: Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", help="Where it stands, as tail shows it.")],
) -> Report:
    """Print one record whole, as JSON. Exits with 1 where none stands: at a transaction's marker, or an aborted record.

    \b
    Examples:
      laminar topics get trajectories 0:17
      laminar topics get experiences 0:17 | jq .rows[0].trajectory.text
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        raise typer.BadParameter(f"{place!r} is no place, like 0:17", param_hint="PARTITION:OFFSET")
    partition, offset = int(found[1]), int(found[2])
    to = address.connect()
    name, known = known_topic(topic, to.run)
    held = partition_ranges(to.client, name).get(partition)
    if held is None or not held.beginning <= offset < held.end:
        there = f"it holds {held.beginning} to {held.end - 1}" if held else "there is no such partition"
        raise RuntimeError(f"{name} has no record at {place}: {there}")
    chunks = read_chunks(to.client, known, name, {partition: PartitionRange(offset, held.end)})
    item = next((item for chunk in chunks for item in as_items(chunk, name)), None)
    if item is None or item["offset"] != offset:
        follows = f"the next stands at {partition}:{item['offset']}" if item else "none follows"
        raise RuntimeError(f"{name} has no record at {place} (a transaction's marker, aborted or compacted): {follows}")
    return Report(item, str, as_json=True)
