"""`laminar topics replay` and `reset`: publish records again, and reset committed offsets. Dry runs by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Annotated

import typer

from infra.conditions.grammar import ConditionError
from infra.conditions.tables import table_condition
from infra.kafka.admin import admin_client
from infra.kafka.group_offsets import set_group_offsets
from infra.kafka.lag import Lag, group_lags, list_groups
from infra.kafka.producer import BoundedProducer
from infra.kafka.ranges import partition_ranges, resolve_span
from infra.kafka.session_config import Partition
from operators.export.columns import row_schema
from pipelines.cli.options import Address, Printing, RunClient
from pipelines.cli.read_options import ReadOptions
from pipelines.cli.topic_names import TopicArgument, full_name, known_topic
from pipelines.inspect.log.chunks import LogChunk, read_chunks
from pipelines.present.output import RowOutput
from schemas.topics import RESTORE, run_prefix

ExecuteOption = Annotated[bool, typer.Option("--execute", help="Make the change; without it, a dry run.")]
DRY_RUN = " (dry run; use --execute)"
NOT_RESETTABLE = {
    "trainer": "it continues from the offsets in its checkpoint",
    "rollout": "it reads only records newer than its start",
}
"""Pipelines whose committed offsets are for display alone."""


def replay_command(
    topic: TopicArgument,
    reading: ReadOptions,
    address: Address,
    where: Annotated[
        str, typer.Option("--where", "-w", metavar="CONDITION", help="Only records with a matching row.")
    ] = "",
    to_topic: Annotated[
        str | None, typer.Option("--to", metavar="TOPIC", help="The target topic; by default the same topic.")
    ] = None,
    execute: ExecuteOption = False,
) -> RowOutput:
    """Publish records of a topic again, unchanged, with key and headers, to the same partitions. Dry run by default.

    Select the records by offset, partition or condition. Consumers drop records that they have processed already.

    \b
    Examples:
      laminar topics replay trajectories -p 0 -o 5:9
      laminar topics replay experiences -w "reward_error is not null" -o @-1h --execute
      laminar topics replay prompts -o beginning --to laminar.again.prompts --execute
    """
    if reading.span is None and reading.numbers is None and not where:
        raise typer.BadParameter("select the records with -o, -p or --where", param_hint="-o")
    connection = address.connect() if execute else address.open_log()
    name, known = known_topic(topic, connection.run)
    target = full_name(to_topic, connection.run) if to_topic else name
    try:
        condition = table_condition(where, row_schema(known)) if where else None
    except ConditionError as error:
        raise typer.BadParameter(str(error), param_hint="--where") from error
    ranges = reading.ranges(connection, name)
    if missing := sorted(ranges.keys() - partition_ranges(connection.client, target).keys()):
        raise RuntimeError(f"the target topic {target} has no partitions {missing}")

    def rows() -> Iterator[list[dict[str, object]]]:
        with BoundedProducer(connection.client) if execute else nullcontext() as producer:
            for chunk in read_chunks(connection.client, known, name, ranges):
                selected: Iterable[int] = range(len(chunk.records))
                if condition is not None:
                    offsets = set(condition.rows(chunk.table())["kafka_offset"].to_pylist())
                    selected = [at for at in selected if chunk.records.offsets[at] in offsets]
                yield [_send(chunk, at, target, producer) for at in selected if chunk.records.values[at] is not None]

    return RowOutput(rows(), ("from", "to", "bytes", "action"), reading.form("table"), "no matching records")


def _send(chunk: LogChunk, at: int, target: str, producer: BoundedProducer | None) -> dict[str, object]:
    records = chunk.records
    value = records.values[at] or b""
    if producer is not None:
        producer.send(target, value, key=records.keys[at], headers=records.headers[at], partition=records.partition)
    return {
        "from": f"{records.partition}:{records.offsets[at]}",
        "to": target,
        "bytes": len(value),
        "action": "sent" if producer is not None else f"would be sent{DRY_RUN}",
    }


def reset_command(
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="score, experience, ... or a consumer group's name.")
    ],
    topic: TopicArgument,
    address: Address,
    printing: Printing,
    offset: Annotated[
        str,
        typer.Option("--to", metavar="OFFSET", help="beginning, end, N, -N, +N, @TIME or @-1h.", show_default=False),
    ],
    partitions: Annotated[
        str | None, typer.Option("-p", "--partitions", metavar="0,1", help="Only these partitions.")
    ] = None,
    execute: ExecuteOption = False,
) -> RowOutput:
    """Reset a pipeline's committed offsets in a topic. Dry run by default. A running process of it is fenced.

    A reset backwards is safe: the pipeline drops records that it has processed already. A reset forwards skips records,
    and the audit then reports their trajectories as lost.

    \b
    Examples:
      laminar topics reset score trajectories --to beginning
      laminar topics reset experience experiences --to @-1h -p 0 --execute
    """
    reading = ReadOptions([offset], partitions)
    span = reading.span
    if span is None or span.last is not None:
        raise typer.BadParameter(f"{offset!r} is not a single offset", param_hint="--to")
    connection = address.connect() if execute else address.open_log()
    if pipeline in NOT_RESETTABLE:
        raise typer.BadParameter(f"{pipeline} cannot be reset: {NOT_RESETTABLE[pipeline]}", param_hint="PIPELINE")
    name = full_name(topic, connection.run)
    resolved = resolve_span(connection.client, name, span, reading.numbers)
    offsets = {number: each.beginning for number, each in resolved.items()}
    found = [lag for lag in _committed(connection, pipeline, name) if lag.partition in offsets]
    if not found:
        raise RuntimeError(f"{pipeline} of run {connection.run} has no committed offsets in {name}")
    if execute:
        for group in sorted({lag.group for lag in found}):
            moved = {lag.partition: offsets[lag.partition] for lag in found if lag.group == group}
            restore, timeout_s = Partition(RESTORE.name(connection.run), 0), address.transaction_timeout_s
            set_group_offsets(connection.client, group, name, moved, restore, timeout_s)
    rows = [_reset_row(lag, offsets[lag.partition], execute) for lag in found]
    return RowOutput([rows], list(rows[0]), printing.form())


def _committed(connection: RunClient, pipeline: str, topic: str) -> list[Lag]:
    with admin_client(connection.client) as admin:
        groups = [
            group
            for group in list_groups(admin, run_prefix(connection.run))
            if group == pipeline or group.removeprefix(run_prefix(connection.run)).rpartition(".")[0] == pipeline
        ]
        return [lag for lag in group_lags(admin, groups) if lag.topic == topic]


def _reset_row(lag: Lag, offset: int, execute: bool) -> dict[str, object]:
    again, skipped = max(0, lag.committed - offset), max(0, offset - lag.committed)
    action = f"rereads {again} offsets" if again else f"SKIPS {skipped} offsets" if skipped else "unchanged"
    return {
        "group": lag.group,
        "topic": lag.topic,
        "partition": lag.partition,
        "current_offset": lag.committed,
        "new_offset": offset,
        "action": action if execute else f"{action}{DRY_RUN}",
    }
