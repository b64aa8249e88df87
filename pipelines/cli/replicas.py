"""`laminar replicas`: show the replicas of a run from their heartbeats, and drain one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from infra.clocks import wall_ms
from infra.kafka.producer import BoundedProducer
from infra.kafka.topic_reader import last_of_each_key
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption, Printing, RunClient
from pipelines.present.output import Report, Row, RowOutput
from schemas.codec import encode
from schemas.records import Drain, ReplicaStatus, StageStatus
from schemas.topics import INBOX, REPLICAS, inbox_partition

app = Commands(invoke_without_command=True)
COLUMNS = (
    *("replica", "state", "version", "stage", "kv", "running", "waiting", "tokens_per_s"),
    *("heartbeat", "incarnation", "host", "reported_by"),
)
MAX_HEARTBEATS = 20_000
"""Heartbeats read, of all replicas together."""
RATE_WINDOW_MS = 10_000


@app.callback()
def replicas(context: typer.Context, address: Address, printing: Printing) -> RowOutput | None:
    """Show each replica's state, weight version, load, speed and last heartbeat.

    `stage` is its part in a group of replicas that run a version together while it arrives: the group, whether the
    replica leads it, and its layers; or why a replica without weights waits for the whole version. `reported_by` names
    the replicas that cannot connect to its KV address: trajectories move from it to them without their KV.

    \b
    Examples:
      laminar replicas
      laminar replicas --json | jq '.[] | select(.state == "draining")'
      laminar replicas drain 3
    """
    if context.invoked_subcommand is not None:
        return None
    connection = address.open_log()
    found, now = _last_rows(connection), wall_ms()
    stages = {row.replica: row for row in found if isinstance(row, StageStatus)}  # the last of each
    heartbeats = heartbeats_in(found)
    rows = [
        replica_row(each, now, stages.get(replica)) | {"reported_by": reporters(each[-1], heartbeats)}
        for replica, each in heartbeats.items()
    ]
    return RowOutput([rows], COLUMNS, printing.form(), f"run {connection.run} has no replicas yet", cells=_cells)


@app.command()
def drain(
    address: Address,
    replica: Annotated[
        int, typer.Argument(metavar="REPLICA", min=0, help="The replica's number in `laminar replicas`.")
    ],
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait until the replica is drained.")
    ] = 0.0,
    json: JsonOption = False,
) -> Report:
    """Drain a replica: assign it no new work, and move its trajectories to replicas with room, until it restarts.

    The replica finishes the trajectories for which no other replica has room. Once it is `drained` its process can be
    stopped, and no token is generated twice: `laminar runs stop --role rollout-N` ends a process of `submit --detach`
    for good (N: the number of the replica, divided by rollout.replicas). With --wait, exits with 1 if the replica is
    not drained in time.

    \b
    Examples:
      laminar replicas drain 3
      laminar replicas drain 3 --wait 600 && laminar runs stop --role rollout-3
    """
    connection = address.connect()
    status = _running_status(connection, replica)
    connection.check_has_started("placement", "drain the replica")
    _publish(connection, Drain(replica, status.incarnation))
    deadline = time.monotonic() + wait
    row = _row_of(connection, replica)
    while row["state"] not in ("drained", "stopped") and time.monotonic() < deadline:
        time.sleep(0.5)
        row = _row_of(connection, replica)
    drained = row["state"] in ("drained", "stopped")
    text = f"replica {replica} is drained" if drained else f"replica {replica} is draining"
    return Report({**row, "drained": drained}, lambda: text, as_json=json, exit_code=1 if wait and not drained else 0)


def read_heartbeats(connection: RunClient) -> dict[int, list[ReplicaStatus]]:
    """Return the last heartbeats of each replica's latest incarnation, oldest first, by replica."""
    return heartbeats_in(_last_rows(connection))


def heartbeats_in(rows: Iterable[Any]) -> dict[int, list[ReplicaStatus]]:
    """Return the heartbeats among `rows` of each replica's latest incarnation, oldest first, by replica."""
    heartbeats: dict[int, list[ReplicaStatus]] = {}
    for row in rows:
        if isinstance(row, ReplicaStatus):
            found = heartbeats.setdefault(row.replica, [])
            if found and row.incarnation > found[-1].incarnation:
                found.clear()
            if not found or row.incarnation == found[-1].incarnation:
                found.append(row)
    return dict(sorted(heartbeats.items()))


def reporters(status: ReplicaStatus, heartbeats: Mapping[int, Sequence[ReplicaStatus]]) -> list[str]:
    """Return the replicas, with their machines, that cannot connect to the KV address in `status`."""
    others = (each[-1] for each in heartbeats.values())
    reports = (each for each in others if each.state != "stopped" and status.kv_address in each.unreachable)
    return [f"{each.replica} of {each.host}" for each in reports]


def _last_rows(connection: RunClient) -> list[Any]:
    name = REPLICAS.name(connection.run)
    records = last_of_each_key(connection.client, name, MAX_HEARTBEATS, RATE_WINDOW_MS)
    return [row for record in records for row in record.rows]


def replica_row(heartbeats: list[ReplicaStatus], now: int, stage: StageStatus | None = None) -> dict[str, Any]:
    """Return the row of one replica from its heartbeats and its `stage`, at `now` (Unix milliseconds)."""
    last = heartbeats[-1]
    own = stage if stage is not None and stage.incarnation == last.incarnation else None
    grouped = own if own is not None and own.group and last.state != "stopped" else None
    idle = last.running == last.waiting == 0
    return {
        "replica": last.replica,
        "state": "drained" if last.state == "draining" and idle else last.state,
        "version": None if last.policy_version is None else str(last.policy_version),
        "kv_used": last.kv_used,
        "kv_capacity": last.kv_capacity,
        "running": last.running,
        "waiting": last.waiting,
        "capacity": last.capacity,
        "tokens_per_s": _rate(heartbeats),
        "last_heartbeat": last.sent_at,
        "heartbeat_age_s": round(max(0, now - last.sent_at) / 1000, 1),
        "incarnation": last.incarnation,
        "process": last.process,
        "host": last.host,
        "pid": last.pid,
        "reserved": list(last.reserved),
        "kv_address": last.kv_address,
        "group": grouped and grouped.group,
        "leads": grouped is not None and grouped.leads,
        "layers": grouped and [grouped.first, grouped.end],
        "refusal": own.refusal if own is not None else "",
    }


def _rate(heartbeats: list[ReplicaStatus]) -> float | None:
    """Return tokens per second over the last heartbeats; None if the sender's clock was set back meanwhile."""
    last = heartbeats[-1]
    first = next(each for each in heartbeats if 0 <= last.sent_at - each.sent_at <= RATE_WINDOW_MS)
    milliseconds = last.sent_at - first.sent_at
    return round(1000 * (last.tokens_generated - first.tokens_generated) / milliseconds, 1) if milliseconds else None


def _stage_text(row: Row) -> str | None:
    if row["group"] is None:
        return f"none: {row['refusal']}" if row["refusal"] and row["version"] is None else None
    first, end = row["layers"]
    layers = f"layers {first}-{end - 1}" if end > first else "no layers"
    return f"{row['group']}{' (leads)' if row['leads'] else ''}: {layers}"


def _cells(row: Row) -> Row:
    share = f"{100 * row['kv_used'] / row['kv_capacity']:.0f} %" if row["kv_capacity"] else None
    return {
        **{name: row[name] for name in ("replica", "state", "version", "running", "waiting", "incarnation")},
        "stage": _stage_text(row),
        "kv": share,
        "tokens_per_s": row["tokens_per_s"],
        "heartbeat": f"{row['heartbeat_age_s']:g} s ago",
        "host": f"{row['host']}, pid {row['pid']}",
        "reported_by": f"{', '.join(row['reported_by'])} ({row['kv_address']})" if row["reported_by"] else None,
    }


def _row_of(connection: RunClient, replica: int) -> dict[str, Any]:
    return replica_row(read_heartbeats(connection)[replica], wall_ms())


def _running_status(connection: RunClient, replica: int) -> ReplicaStatus:
    """Return the last heartbeat of `replica`. Raises RuntimeError if there is no such replica, or it has stopped."""
    heartbeats = read_heartbeats(connection)
    if replica not in heartbeats:
        known = ", ".join(map(str, heartbeats)) or "none"
        raise RuntimeError(f"run {connection.run} has no replica {replica}; its replicas: {known}")
    status = heartbeats[replica][-1]
    if status.state == "stopped":
        raise RuntimeError(f"replica {replica} has stopped already")
    return status


def _publish(connection: RunClient, request: Drain) -> None:
    value, headers = encode(request)
    with BoundedProducer(connection.client) as producer:
        producer.send(INBOX.name(connection.run), value, headers=headers, partition=inbox_partition(request.replica))
