"""`laminar topics transactions`: transactions that are open, behind which readers wait, and how to end them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from infra.kafka.admin import admin_client, list_topics
from infra.kafka.fencing import fence
from infra.kafka.open_transactions import OpenTransaction, open_transactions, write_marker
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Connection, Printing
from pipelines.cli.repair import ExecuteOption
from pipelines.present.output import RowOutput
from schemas.topics import run_prefix

app = Commands(no_args_is_help=True)
COLUMNS = ("topic", "partition", "first_offset", "transactional_id", "producer_id", "state", "silent_s", "what")


@app.callback()
def transactions() -> None:
    """List open transactions, and end those whose producer will not.

    \b
    Examples:
      laminar topics transactions list
      laminar topics transactions abort 4711 --execute
    """


@app.command("list")
def list_(address: Address, printing: Printing) -> RowOutput:
    """List the transactions that are open in a run's topics. A pipeline at work has one for milliseconds.

    \b
    Examples:
      laminar topics transactions list
      laminar topics transactions list --json | jq 'map(select(.silent_s > 60))'
    """
    to = address.connect()
    return RowOutput([[_row(each) for each in _open(to)]], COLUMNS, printing.form(), "no transaction is open")


@app.command()
def abort(
    producer_id: Annotated[int, typer.Argument(metavar="PRODUCER", help="A producer_id of `list`.")],
    address: Address,
    printing: Printing,
    execute: ExecuteOption = False,
) -> RowOutput:
    """End the open transactions of a producer. A dry run unless told to.

    One that its coordinator knows is aborted, and a process that still runs under its transactional id is fenced: it
    starts again. One that hangs gets the marker that its coordinator says it lacks.

    \b
    Examples:
      laminar topics transactions abort 4711
      laminar topics transactions abort 4711 --execute
    """
    to = address.connect()
    found = [each for each in _open(to) if each.producer_id == producer_id]
    if not found:
        raise RuntimeError(f"producer {producer_id} has no open transaction in the topics of run {to.run}")
    if execute:
        _end(to, found)
    told = "" if execute else "would be: "
    rows = [_row(each) | {"what": told + ("marker written" if each.hangs else "aborted, fenced")} for each in found]
    return RowOutput([rows], COLUMNS, printing.form())


def _open(to: Connection) -> list[OpenTransaction]:
    with admin_client(to.client) as admin:
        return open_transactions(admin, list_topics(admin, run_prefix(to.run)))


def _end(to: Connection, found: list[OpenTransaction]) -> None:
    for name in {each.transactional_id for each in found if not each.hangs and each.transactional_id}:
        fence(to.client, name)
    with admin_client(to.client) as admin:
        for each in found:
            if each.hangs:
                write_marker(admin, each)


def _row(each: OpenTransaction) -> dict[str, Any]:
    return {
        "topic": each.topic,
        "partition": each.partition,
        "first_offset": each.first,
        "transactional_id": each.transactional_id or "",
        "producer_id": each.producer_id,
        "state": each.state,
        "silent_s": round(max(0.0, time.time() - each.wrote_at / 1000), 1),
        "what": "hangs: nobody will end it" if each.hangs else "its producer or the time-out ends it",
    }
