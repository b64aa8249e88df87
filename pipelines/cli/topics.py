"""`laminar topics`: what stands in a run's topics, and how far its pipelines are behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from infra.kafka.admin import TopicDescription, admin_client, describe, list_topics
from infra.kafka.lag import group_lags, list_groups, record_counts
from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.reading import last_records, partition_ranges, resolve_span
from pipelines.cli.dead_letters import app as dlq
from pipelines.cli.find import find_command, stats_command
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption, Printing
from pipelines.cli.output import Report, Row, Rows
from pipelines.cli.places import get_command, offsets_command
from pipelines.cli.record_format import envelope, formatter
from pipelines.cli.record_text import SHOWN, TAIL_SCHEMA, as_items, as_line, as_rows
from pipelines.cli.repair import replay_command, reset_command
from pipelines.cli.topic_names import TopicArgument, full_name, known_topic
from pipelines.cli.topic_reading import Reading
from pipelines.log.chunks import chunks_of, read_chunks, undecoded
from schemas.topics import CATALOGUE, run_prefix

app = Commands(no_args_is_help=True)

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
    address: Address,
    printing: Printing,
) -> Rows:
    """List the topics of a run: partitions, offsets held, cleanup, records.

    \b
    Examples:
      laminar topics list
      laminar topics list --run first -b localhost:9092 --json
    """
    to = address.connect()
    with admin_client(to.client) as admin:
        names = list_topics(admin, run_prefix(to.run))
        found, counts = describe(admin, names), record_counts(admin, names) if names else {}
    rows = [_listed(found[name], counts[name]) for name in names if name in found]
    columns = ("topic", "partitions", "offsets", "cleanup", "records")
    return Rows([rows], columns, printing.form(), f"run {to.run} has no topics")


@app.command("describe")
def describe_(
    address: Address,
    topic: TopicArgument,
    json: JsonOption = False,
) -> Report:
    """Describe a topic: who writes and reads it, its settings, and what each partition holds.

    \b
    Examples:
      laminar topics describe trajectories
      laminar topics describe laminar.first.relay --json
    """
    to = address.connect()
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
    reading: Reading,
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
) -> Rows:
    """Print records of a topic, decoded; those that cannot be are shown as such. Joins no group, commits nothing.

    With --follow and without an offset, it begins with the last ones of each partition. Where they apply, each row is
    told with its trajectory, version, staleness, reward, tokens and lease; these are the columns of a table, too.

    \b
    Examples:
      laminar topics tail trajectories
      laminar topics tail settled -n 100 --json | jq .rows[].fate
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
    elif kind in ("table", "csv", "arrow"):
        items = ([row for item in part for row in as_rows(item)] for part in items)
    return Rows(items, SHOWN, kind, f"{name} has no such records", line, schema=TAIL_SCHEMA)


def _cut(parts: Iterable[list[Any]], count: int | None) -> Iterator[list[Any]]:
    """`parts` up to `count` items in all."""
    left = count
    for part in parts:
        yield part[:left]
        if left is not None and (left := left - len(part)) <= 0:
            return


app.command("find")(find_command)
app.command("stats")(stats_command)
app.command("get")(get_command)
app.command("offsets")(offsets_command)
app.command("replay")(replay_command)
app.command("reset")(reset_command)
app.add_typer(dlq, name="dlq")


@app.command()
def lag(
    address: Address,
    printing: Printing,
) -> Rows:
    """Say how far each pipeline of a run is behind. The committed offset is the mark below which nothing is pending.

    \b
    Examples:
      laminar topics lag
      laminar topics lag --json | jq 'map(.lag) | add'
    """
    to = address.connect()
    with admin_client(to.client) as admin:
        lags = group_lags(admin, list_groups(admin, run_prefix(to.run)))
    rows = [
        dict(
            zip(LAG_COLUMNS, (each.group, each.topic, each.partition, each.committed, each.end, each.lag), strict=True)
        )
        for each in lags
    ]
    return Rows([rows], LAG_COLUMNS, printing.form(), f"run {to.run} has no groups")


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
