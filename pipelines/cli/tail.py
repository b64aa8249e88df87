"""`laminar topics tail` and `get`: print the records of a topic, decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.ranges import PartitionRange, partition_ranges, resolve_span
from infra.kafka.topic_reader import last_records, raw_decoder
from pipelines.cli.options import Address, FollowOption
from pipelines.cli.read_options import ReadOptions
from pipelines.cli.topic_names import TopicArgument, known_topic
from pipelines.inspect.log.chunks import chunks_of, read_chunks
from pipelines.present.output import Report, RowOutput
from pipelines.present.record_text import TAIL_COLUMNS, TAIL_SCHEMA, as_items, as_line, as_rows, envelope, formatter

_POSITION = re.compile(r"(\d{1,9}):(\d{1,18})")


def tail_command(
    topic: TopicArgument,
    reading: ReadOptions,
    address: Address,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=0, help="How many records; without -o the last ones, by default 10."),
    ] = None,
    follow: FollowOption = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="kcat's format: %t %p %o %k %s %S %K %h %T; %s is decoded."),
    ] = None,
    kcat: Annotated[bool, typer.Option("-J", help="Print kcat's JSON envelope.")] = False,
) -> RowOutput:
    """Print records of a topic, decoded; undecodable records are marked. Joins no consumer group, commits nothing.

    With --follow and without -o, it starts with the last records of each partition. Each row shows its trajectory,
    version, staleness, reward, tokens and lease where they apply; these are also the columns of a table. A line begins
    with partition:offset, and the record's schema and its version, such as Trajectory/4.

    \b
    Examples:
      laminar topics tail trajectories
      laminar topics tail settled -n 100 --json | jq .[].rows[].outcome
      laminar topics tail inbox -p 0 -o beginning -n 5 -O table
      laminar topics tail settled -o @-1h --format '%p:%o %k %s'
      laminar topics tail metrics --follow
    """
    try:
        line = as_line if form is None else formatter(form)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--format") from error
    span, numbers = reading.span, reading.numbers
    connection = address.open_log()
    name, known = known_topic(topic, connection.run)
    if span is not None or follow:
        last = OffsetSpan(Edge("end", 10 if count is None else count), None)
        ranges = resolve_span(connection.client, name, span or last, numbers)
        items = _limited(
            (
                list(as_items(chunk, name))
                for chunk in read_chunks(connection.client, known, name, ranges, follow=follow)
            ),
            count if span is not None else None,
        )
    else:
        found = last_records(connection.client, name, 10 if count is None else count, numbers, decoder=raw_decoder)
        items = (list(as_items(chunk, name)) for chunk in chunks_of(known, found))
    kind = "jsonl" if kcat else reading.form("lines", follow=follow)
    if kcat:
        items = ([envelope(item) for item in part] for part in items)
    elif kind in ("table", "csv", "csv-raw", "arrow"):
        items = ([row for item in part for row in as_rows(item)] for part in items)
    return RowOutput(items, TAIL_COLUMNS, kind, f"{name} has no matching records", line, schema=lambda: TAIL_SCHEMA)


def _limited(parts: Iterable[list[Any]], count: int | None) -> Iterator[list[Any]]:
    """Yield `parts` up to `count` items in all."""
    remaining = count
    for part in parts:
        yield part[:remaining]
        if remaining is not None and (remaining := remaining - len(part)) <= 0:
            return


def get_command(
    address: Address,
    topic: TopicArgument,
    position: Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", help="The record's position, as in `tail`.")],
) -> Report:
    """Print one whole record as JSON. Exits with 1 if the offset has none, e.g. a transaction marker or aborted record.

    \b
    Examples:
      laminar topics get trajectories 0:17
      laminar topics get experiences 0:17 | jq .rows[0].trajectory.text
    """
    found = _POSITION.fullmatch(position)
    if found is None:
        raise typer.BadParameter(
            f"{position!r} is not a partition and offset, such as 0:17", param_hint="PARTITION:OFFSET"
        )
    partition, offset = int(found[1]), int(found[2])
    connection = address.open_log()
    name, known = known_topic(topic, connection.run)
    offsets = partition_ranges(connection.client, name).get(partition)
    if offsets is None or not offsets.beginning <= offset < offsets.end:
        there = f"its offsets are {offsets.beginning} to {offsets.end - 1}" if offsets else "there is no such partition"
        raise RuntimeError(f"{name} has no record at {position}: {there}")
    chunks = read_chunks(connection.client, known, name, {partition: PartitionRange(offset, offsets.end)})
    item = next((item for chunk in chunks for item in as_items(chunk, name)), None)
    if item is None or item["offset"] != offset:
        following = f"the next record is at {partition}:{item['offset']}" if item else "no record follows"
        raise RuntimeError(
            f"{name} has no record at {position} (a transaction marker, aborted or compacted): {following}"
        )
    return Report(item, str, as_json=True)
