"""`laminar replicas`: what the replicas of a run do, from their heartbeats, and sending one into retirement."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from infra.kafka.producer import BoundedProducer
from infra.kafka.reading import last_of_each_key
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Connection, JsonOption, Printing
from pipelines.present.output import Report, Row, RowOutput
from schemas.codec import encode
from schemas.records import Drain, ReplicaStatus
from schemas.topics import INBOX, REPLICAS

app = Commands(invoke_without_command=True)
COLUMNS = ("replica", "state", "version", "kv", "running", "waiting", "tokens_s", "heard", "incarnation", "where")
BEATS = 20_000
"""Heartbeats that are looked at, of all replicas together."""
RATE_MS = 10_000


@app.callback()
def replicas(
    context: typer.Context,
    address: Address,
    printing: Printing,
) -> RowOutput | None:
    """Show what each replica does: its version, its load, its speed, and when it was last heard of.

    \b
    Examples:
      laminar replicas
      laminar replicas --json | jq '.[] | select(.state == "draining")'
      laminar replicas drain 3
    """
    if context.invoked_subcommand is not None:
        return None
    to = address.connect()
    rows = [replica_row(beats, time.time_ns() // 10**6) for beats in read_beats(to).values()]
    return RowOutput([rows], COLUMNS, printing.form(), f"run {to.run} has no replicas yet", shown=_shown)


@app.command()
def drain(
    address: Address,
    replica: Annotated[int, typer.Argument(metavar="REPLICA", min=0, help="Its number in `laminar replicas`.")],
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="Wait until it has nothing left."),
    ] = 0.0,
    json: JsonOption = False,
) -> Report:
    """Give a replica no fresh work and move away what others have room for, until its process is started again.

    What does not fit elsewhere it finishes itself. Once it is `drained` its process can be stopped and nothing is
    generated twice. With --wait, exits with 1 if it is not drained in time.

    \b
    Examples:
      laminar replicas drain 3
      laminar replicas drain 3 --wait 600 && kill PID
    """
    to = address.connect()
    status = _living(to, replica)
    _tell(to, Drain(replica, status.incarnation))
    deadline = time.monotonic() + wait
    row = _row_of(to, replica)
    while row["state"] not in ("drained", "stopped") and time.monotonic() < deadline:
        time.sleep(0.5)
        row = _row_of(to, replica)
    done = row["state"] in ("drained", "stopped")
    text = f"replica {replica} is drained" if done else f"replica {replica} is told to drain"
    return Report({**row, "drained": done}, lambda: text, as_json=json, exit_code=1 if wait and not done else 0)


def read_beats(to: Connection) -> dict[int, list[ReplicaStatus]]:
    """The last heartbeats of each replica's latest incarnation, oldest first, by replica."""
    beats: dict[int, list[ReplicaStatus]] = {}
    for record in last_of_each_key(to.client, REPLICAS.name(to.run), BEATS, RATE_MS):
        for row in record.rows:
            if isinstance(row, ReplicaStatus):
                heard = beats.setdefault(row.replica, [])
                if heard and row.incarnation > heard[-1].incarnation:
                    heard.clear()
                if not heard or row.incarnation == heard[-1].incarnation:
                    heard.append(row)
    return dict(sorted(beats.items()))


def replica_row(beats: list[ReplicaStatus], now: int) -> dict[str, Any]:
    """What the heartbeats of one replica say at `now` (Unix milliseconds)."""
    last = beats[-1]
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
        "tokens_per_second": _rate(beats),
        "last_heartbeat": last.sent_at,
        "seconds_ago": round(max(0, now - last.sent_at) / 1000, 1),
        "incarnation": last.incarnation,
        "process": last.process,
        "host": last.host,
        "pid": last.pid,
        "reserved": list(last.reserved),
    }


def _rate(beats: list[ReplicaStatus]) -> float | None:
    """Tokens a second over the last heartbeats; None where the sender's clock has gone back since."""
    last = beats[-1]
    first = next(beat for beat in beats if 0 <= last.sent_at - beat.sent_at <= RATE_MS)
    milliseconds = last.sent_at - first.sent_at
    return round(1000 * (last.tokens_generated - first.tokens_generated) / milliseconds, 1) if milliseconds else None


def _shown(row: Row) -> Row:
    share = f"{100 * row['kv_used'] / row['kv_capacity']:.0f} %" if row["kv_capacity"] else None
    return {
        **{name: row[name] for name in ("replica", "state", "version", "running", "waiting", "incarnation")},
        "kv": share,
        "tokens_s": row["tokens_per_second"],
        "heard": f"{row['seconds_ago']:g} s ago",
        "where": f"{row['host']}, process {row['pid']}",
    }


def _row_of(to: Connection, replica: int) -> dict[str, Any]:
    return replica_row(read_beats(to)[replica], time.time_ns() // 10**6)


def _living(to: Connection, replica: int) -> ReplicaStatus:
    """The last heartbeat of `replica`. Raises RuntimeError if there is no such replica, or it has stopped."""
    beats = read_beats(to)
    if replica not in beats:
        known = ", ".join(map(str, beats)) or "none"
        raise RuntimeError(f"run {to.run} has no replica {replica}: there are {known}")
    status = beats[replica][-1]
    if status.state == "stopped":
        raise RuntimeError(f"replica {replica} has stopped already")
    return status


def _tell(to: Connection, order: Drain) -> None:
    value, headers = encode(order)
    with BoundedProducer(to.client) as producer:
        producer.send(INBOX.name(to.run), value, headers=headers, partition=order.replica)
