"""`laminar topics`: what stands in a run's topics, and how far its pipelines are behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from infra.kafka.admin import TopicDescription, admin_client, describe, list_topics
from infra.kafka.lag import group_lags, list_groups, record_counts
from infra.kafka.offset_span import parse_span
from infra.kafka.reading import StoredRecord, last_records, partition_ranges, read_topic, resolve_span
from infra.kafka.start_offset import StartOffset
from pipelines.cli.dead_letters import app as dlq
from pipelines.cli.find import OffsetsOption, PartitionsOption, find_command, stats_command
from pipelines.cli.options import BrokersOption, JsonOption, PropertiesOption, RunOption, connect
from pipelines.cli.output import Report, Row, Stream, table
from pipelines.cli.places import get_command, offsets_command
from pipelines.cli.record_format import envelope, formatter
from pipelines.cli.record_text import as_json, as_line
from pipelines.cli.topic_names import TopicArgument, full_name
from schemas.topics import CATALOGUE, run_prefix

app = typer.Typer(no_args_is_help=True)

LAG_COLUMNS = ("group", "topic", "partition", "current_offset", "log_end_offset", "lag")


@app.callback()
def topics() -> None:
    """Look into a run's topics.

    \b
    Examples:
      laminar topics list
      laminar topics tail trajectories -n 3
      laminar topics find experiences -w "reward > 0.5" -n 3
      laminar topics lag
    """


@app.command("list")
def list_(
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Report:
    """List the topics of a run: partitions, offsets held, cleanup, records.

    \b
    Examples:
      laminar topics list
      laminar topics list --run first -b localhost:9092 --json
    """
    to = connect(run, brokers, command_config)
    with admin_client(to.client) as admin:
        names = list_topics(admin, run_prefix(to.run))
        found, counts = describe(admin, names), record_counts(admin, names) if names else {}
    rows = [_listed(found[name], counts[name]) for name in names if name in found]
    columns = ("topic", "partitions", "offsets", "cleanup", "records")
    return Report(rows, lambda: table(rows, columns) if rows else f"run {to.run} has no topics", as_json=json)


@app.command("describe")
def describe_(
    topic: TopicArgument,
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Report:
    """Describe a topic: who writes and reads it, its settings, and what each partition holds.

    \b
    Examples:
      laminar topics describe trajectories
      laminar topics describe laminar.first.relay --json
    """
    to = connect(run, brokers, command_config)
    name = full_name(topic, to.run)
    ranges = partition_ranges(to.client, name)
    with admin_client(to.client) as admin:
        described = describe(admin, [name])[name]
    known = CATALOGUE.get(name.removeprefix(run_prefix(to.run)))
    data = {
        "topic": name,
        "about": known.about if known else None,
        "key": known.key if known else None,
        "records": [kind.__name__ for kind in known.records] if known else [],
        "producers": list(known.producers) if known else [],
        "consumers": list(known.consumers) if known else [],
        "replication_factor": described.replication_factor,
        "config": dict(described.config),
        "partitions": [
            {"partition": number, "beginning": held.beginning, "end": held.end} for number, held in ranges.items()
        ],
    }
    return Report(data, lambda: _description(data), as_json=json)


@app.command()
def tail(
    topic: TopicArgument,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=0, help="So many records; without -o the last ones, 10 by default."),
    ] = None,
    offset: OffsetsOption = None,
    partitions: PartitionsOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes.")] = False,
    form: Annotated[
        str | None,
        typer.Option("-f", "--format", metavar="FORMAT", help="kcat's: %t %p %o %k %s %S %K %h %T; %s is decoded."),
    ] = None,
    kcat: Annotated[bool, typer.Option("-J", help="kcat's JSON envelope.")] = False,
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Stream:
    """Print records of a topic, decoded; those that cannot be are shown as such. Joins no group, commits nothing.

    With --follow and without -o, it begins with the last ones of each partition.

    \b
    Examples:
      laminar topics tail trajectories
      laminar topics tail settled -n 100 --json | jq .rows[].fate
      laminar topics tail inbox -p 0 -o beginning -n 5
      laminar topics tail settled -o @-1h -f '%p:%o %k %s'
      laminar topics tail metrics --follow
    """
    last, wanted = 10 if count is None else count, _parsed_partitions(partitions)
    try:
        span = parse_span(offset, time.time_ns() // 1_000_000) if offset else None
        line = as_line if form is None else formatter(form)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    to = connect(run, brokers, command_config)
    name = full_name(topic, to.run)

    def records() -> Iterator[StoredRecord]:
        if span is not None:
            ranges = resolve_span(to.client, name, span, wanted)
            start = {number: held.beginning for number, held in ranges.items()}
            until = {number: held.end for number, held in ranges.items()}
            found = read_topic(to.client, name, start=start, partitions=wanted, until=until, follow=follow)
            yield from islice(found, count)
        elif follow:
            yield from read_topic(
                to.client, name, start=StartOffset(last, from_end=True), partitions=wanted, follow=True
            )
        else:
            yield from last_records(to.client, name, last, wanted)

    items = (as_json(record) for record in records())
    return Stream(map(envelope, items) if kcat else items, line, as_json=json or kcat)


app.command("find")(find_command)
app.command("stats")(stats_command)
app.command("get")(get_command)
app.command("offsets")(offsets_command)
app.add_typer(dlq, name="dlq")


@app.command()
def lag(
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Report:
    """Say how far each pipeline of a run is behind. The committed offset is the mark below which nothing is pending.

    \b
    Examples:
      laminar topics lag
      laminar topics lag --json | jq 'map(.lag) | add'
    """
    to = connect(run, brokers, command_config)
    with admin_client(to.client) as admin:
        lags = group_lags(admin, list_groups(admin, run_prefix(to.run)))
    rows = [
        dict(
            zip(LAG_COLUMNS, (each.group, each.topic, each.partition, each.committed, each.end, each.lag), strict=True)
        )
        for each in lags
    ]
    return Report(rows, lambda: table(rows, LAG_COLUMNS) if rows else f"run {to.run} has no groups", as_json=json)


def _listed(topic: TopicDescription, offsets: int) -> Row:
    known = CATALOGUE.get(topic.name.rpartition(".")[2])
    return {
        "topic": topic.name,
        "partitions": topic.partitions,
        "offsets": offsets,
        "cleanup": topic.config.get("cleanup.policy", "delete"),
        "records": ", ".join(kind.__name__ for kind in known.records) if known else None,
    }


def _description(data: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in sorted(data["config"].items())) or "the broker's defaults"
    lines = [
        f"{data['topic']}: {data['about'] or 'not in the catalogue'}",
        f"  records    {', '.join(data['records'])}, key {data['key'] or 'none'}",
        f"  written by {', '.join(data['producers'])}",
        f"  read by    {', '.join(data['consumers']) or 'people'}",
        f"  settings   {settings}; {data['replication_factor']} replicas",
    ]
    lines += [f"  partition {each['partition']}: {each['beginning']} to {each['end']}" for each in data["partitions"]]
    return "\n".join(lines)


def _parsed_partitions(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of partitions, like 0,1", param_hint="-p") from None
