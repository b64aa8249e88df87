"""`laminar topics create`, `list`, `describe`, `lag` and `offsets`: topics of the brokers, without reading records."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from infra.clocks import wall_ms
from infra.escaping import print_escaped
from infra.kafka.admin import TopicDescription, admin_client, describe, end_offsets, list_topics
from infra.kafka.lag import Lag, group_lags, list_groups, record_counts
from infra.kafka.offset_span import parse_span
from infra.kafka.ranges import partition_ranges, resolve_span
from pipelines.cli.options import Address, JsonOption, Printing
from pipelines.cli.run import ConfigArgument
from pipelines.cli.topic_names import TopicArgument, full_name
from pipelines.inspect.log.manifests import final_version
from pipelines.present.output import Report, Row, RowOutput
from pipelines.present.view.text import beyond_goal_text
from schemas.topics import BATCHES, CATALOGUE, run_prefix

LAG_COLUMNS = ("group", "topic", "partition", "current_offset", "log_end_offset", "lag")


def list_command(address: Address, printing: Printing) -> RowOutput:
    """List the topics of a run: partitions, offsets, cleanup policy and record types.

    OFFSETS counts what the log holds in all partitions: records, each with one or many rows, and the markers of
    transactions. `laminar topics stats TOPIC` counts records and rows.

    \b
    Examples:
      laminar topics list
      laminar topics list --run first -b localhost:9092 --json
    """
    connection = address.open_log()
    with admin_client(connection.client) as admin:
        names = list_topics(admin, run_prefix(connection.run))
        found, counts = describe(admin, names), record_counts(admin, names) if names else {}
    rows = [_listed(found[name], counts[name]) for name in names if name in found]
    columns = ("topic", "partitions", "offsets", "cleanup", "record_types")
    return RowOutput([rows], columns, printing.form(), f"run {connection.run} has no topics")


def describe_command(address: Address, topic: TopicArgument, json: JsonOption = False) -> Report:
    """Describe a topic: its producers and consumers, its settings, and the offsets of each partition.

    \b
    Examples:
      laminar topics describe trajectories
      laminar topics describe laminar.first.relay --json
    """
    connection = address.open_log()
    name = full_name(topic, connection.run)
    ranges = partition_ranges(connection.client, name)
    with admin_client(connection.client) as admin:
        described = describe(admin, [name])[name]
    known = CATALOGUE.get(name.removeprefix(run_prefix(connection.run)))
    data = {
        "topic": name,
        "about": known.description if known else None,
        "key": known.key if known else None,
        "records": list(known.record_names) if known else [],
        "producers": list(known.producers) if known else [],
        "consumers": list(known.consumers) if known else [],
        "replication_factor": described.replication_factor,
        "config": dict(described.config),
        "partitions": [
            {"partition": number, "beginning": each.beginning, "end": each.end} for number, each in ranges.items()
        ],
    }
    return Report(data, lambda: _description(data), as_json=json)


def lag_command(address: Address, printing: Printing) -> RowOutput:
    """Show each pipeline's consumer lag. All records below a committed offset are processed.

    Once all optimizer steps are trained, the trainer needs no more batches: those beyond the goal are no lag.

    \b
    Examples:
      laminar topics lag
      laminar topics lag --json | jq 'map(.lag) | add'
    """
    connection = address.open_log()
    with admin_client(connection.client) as admin:
        lags = group_lags(admin, list_groups(admin, run_prefix(connection.run)))
    batches = BATCHES.name(connection.run)
    left = any(each.topic == batches and each.lag for each in lags)
    beyond_goal = left and final_version(connection.client, connection.run) is not None
    rows = [_lag_row(each, beyond_goal and each.topic == batches) for each in lags]
    none = f"run {connection.run} has no consumer groups"
    return RowOutput([rows], LAG_COLUMNS, printing.form(), none, cells=_lag_cells)


def _lag_row(lag: Lag, beyond_goal: bool) -> Row:
    values = (lag.group, lag.topic, lag.partition, lag.committed, lag.end, 0 if beyond_goal else lag.lag)
    return {**dict(zip(LAG_COLUMNS, values, strict=True)), "beyond_goal": lag.lag if beyond_goal else 0}


def _lag_cells(row: Row) -> Row:
    beyond = row["beyond_goal"]
    return {**row, "lag": f"{row['lag']} ({beyond_goal_text(beyond)})"} if beyond else row


def offsets_command(
    address: Address,
    printing: Printing,
    topic: TopicArgument,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Also show the first offset at TIME: 2026-01-31T12:00, or 2h for two hours ago.",
        ),
    ] = None,
) -> RowOutput:
    """Show each partition's first and end offset. `held-back` offsets become readable when an open transaction ends.

    \b
    Examples:
      laminar topics offsets trajectories
      laminar topics offsets experiences --at 2h --json
    """
    try:
        span = None if at is None else parse_span([f"s@{at}"], wall_ms())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--at") from error
    connection = address.open_log()
    name = full_name(topic, connection.run)
    ranges = partition_ranges(connection.client, name)
    at_time = {} if span is None else resolve_span(connection.client, name, span)
    with admin_client(connection.client) as admin:
        log_ends = {each.partition: end for each, end in end_offsets(admin, [name], committed=False).items()}
    rows = [
        {"partition": number, "beginning": each.beginning, "end": each.end, "held_back": log_ends[number] - each.end}
        | ({"at": at_time[number].beginning} if at_time else {})
        for number, each in ranges.items()
    ]
    return RowOutput([rows], list(rows[0]), printing.form())


def create_command(config: ConfigArgument, json: JsonOption = False) -> Report:
    """Create the topics of CONFIG's run that do not exist, and check the settings of those that do.

    `laminar run` and `laminar submit` do the same; a cluster with ACLs needs an administrator for it. With
    kafka.client_properties = ".../{role}.properties" the file of the user `admin` is used.

    \b
    Examples:
      laminar topics create run.toml
    """
    from infra.kafka.readiness import wait_for_brokers
    from pipelines.config import ConfigError, load_config
    from pipelines.run.run_kafka import WAIT_S
    from pipelines.run.topics import make_topics
    from schemas.topics import CATALOGUE

    loaded = load_config(config)
    if not loaded.run.name:
        raise ConfigError(f"{config}: run.name is not set; it names the run whose topics are created")
    kafka = loaded.kafka
    wait_for_brokers(
        kafka.client(), WAIT_S, lambda _, line: print_escaped(line, err=True), setting=kafka.address_setting
    )
    make_topics(loaded, lambda line: print_escaped(line, err=True))
    names = [topic.name(loaded.run.name) for topic in CATALOGUE.values()]
    data = {"run": loaded.run.name, "topics": names}
    return Report(data, lambda: f"run {loaded.run.name} has its {len(names)} topics", json)


def _listed(topic: TopicDescription, offsets: int) -> Row:
    known = CATALOGUE.get(topic.name.rpartition(".")[2])
    return {
        "topic": topic.name,
        "partitions": topic.partitions,
        "offsets": offsets,
        "cleanup": topic.config.get("cleanup.policy", "delete"),
        "record_types": ", ".join(known.record_names) if known else None,
    }


def _description(data: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in sorted(data["config"].items())) or "broker defaults"
    lines = [
        f"{data['topic']}: {data['about'] or 'not in the catalogue'}",
        f"  records    {', '.join(data['records'])}, key {data['key'] or 'none'}",
        f"  written by {', '.join(data['producers'])}",
        f"  read by    {', '.join(data['consumers']) or 'people and tools'}",
        f"  settings   {settings}; replication factor {data['replication_factor']}",
    ]
    lines += [f"  partition {each['partition']}: {each['beginning']} to {each['end']}" for each in data["partitions"]]
    return "\n".join(lines)
