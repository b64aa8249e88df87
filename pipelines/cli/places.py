"""`laminar topics get` and `offsets`: one record, and where partitions begin and end."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from infra.kafka.admin import admin_client, end_offsets
from infra.kafka.offset_span import parse_span
from infra.kafka.reading import PartitionRange, partition_ranges, resolve_span
from pipelines.cli.options import Address, Printing
from pipelines.cli.output import Report, Rows
from pipelines.cli.record_text import as_items
from pipelines.cli.topic_names import TopicArgument, full_name, known_topic
from pipelines.log.chunks import read_chunks

_PLACE = re.compile(r"(\d{1,9}):(\d{1,18})")


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


def offsets_command(
    address: Address,
    printing: Printing,
    topic: TopicArgument,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Also the first offset at 2026-01-31T12:00, or 2h ago.")
    ] = None,
) -> Rows:
    """Say where each partition begins and ends; `held-back` offsets wait for the end of a transaction.

    \b
    Examples:
      laminar topics offsets trajectories
      laminar topics offsets experiences --at 2h --json
    """
    try:
        span = None if at is None else parse_span([f"s@{at}"], time.time_ns() // 1_000_000)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--at") from error
    to = address.connect()
    name = full_name(topic, to.run)
    ranges = partition_ranges(to.client, name)
    moments = {} if span is None else resolve_span(to.client, name, span)
    with admin_client(to.client) as admin:
        written = {where.partition: end for where, end in end_offsets(admin, [name], committed=False).items()}
    rows = [
        {"partition": number, "beginning": held.beginning, "end": held.end, "held_back": written[number] - held.end}
        | ({"at": moments[number].beginning} if moments else {})
        for number, held in ranges.items()
    ]
    return Rows([rows], list(rows[0]), printing.form())
