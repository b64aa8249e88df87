"""`laminar topics transactions`: list the open transactions that block consumers, and abort them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from infra.kafka.admin import admin_client, list_topics
from infra.kafka.clients import KafkaClients
from infra.kafka.fencing import fence
from infra.kafka.open_transactions import OpenTransaction, decided, open_transactions, write_marker
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Printing, RunClient
from pipelines.cli.repair import ExecuteOption
from pipelines.present.output import RowOutput
from schemas.topics import run_prefix

app = Commands(no_args_is_help=True)
COLUMNS = ("topic", "partition", "first_offset", "transactional_id", "producer_id", "state", "idle_s", "action")


@app.callback()
def transactions() -> None:
    """List open transactions, and abort those that their producer does not end.

    \b
    Examples:
      laminar topics transactions list
      laminar topics transactions abort 4711 --execute
    """


@app.command("list")
def list_(address: Address, printing: Printing) -> RowOutput:
    """List the open transactions in a run's topics. A running pipeline keeps one open for milliseconds.

    Of a stopped run those that its broker will end when it starts again.

    \b
    Examples:
      laminar topics transactions list
      laminar topics transactions list --json | jq 'map(select(.idle_s > 60))'
    """
    connection = address.open_log()
    return RowOutput(
        [[_row(each) for each in _open(connection)]], COLUMNS, printing.form(), "there are no open transactions"
    )


@app.command()
def abort(
    producer_id: Annotated[int, typer.Argument(metavar="PRODUCER", help="A producer_id from `list`.")],
    address: Address,
    printing: Printing,
    execute: ExecuteOption = False,
) -> RowOutput:
    """Abort the open transactions of a producer. Dry run unless --execute.

    If the transaction coordinator has the transaction, it is aborted, and the producer with its transactional.id is
    fenced: a pipeline restarts. If the coordinator has ended it (a hanging transaction), the missing marker is
    written, with the outcome in the coordinators' log.

    \b
    Examples:
      laminar topics transactions abort 4711
      laminar topics transactions abort 4711 --execute
    """
    connection = address.connect()
    found = [each for each in _open(connection) if each.producer_id == producer_id]
    if not found:
        raise RuntimeError(f"producer {producer_id} has no open transaction in the topics of run {connection.run}")
    if execute:
        _abort(connection, found)
    rows = [_row(each) | {"action": _abort_action(each, execute)} for each in found]
    return RowOutput([rows], COLUMNS, printing.form())


def _open(connection: RunClient) -> list[OpenTransaction]:
    with admin_client(connection.client) as admin:
        return open_transactions(admin, list_topics(admin, run_prefix(connection.run)))


def _abort_action(each: OpenTransaction, execute: bool) -> str:
    action = "marker written" if each.hangs else "aborted, producer fenced"
    return action if execute else f"would be: {action} (dry run; use --execute)"


def _abort(connection: RunClient, found: list[OpenTransaction]) -> None:
    for name in {each.transactional_id for each in found if not each.hangs and each.transactional_id}:
        fence(KafkaClients(connection.client), name)
    with admin_client(connection.client) as admin:
        hanging = [each for each in found if each.hangs]
        ending = decided(connection.client, hanging)
        if len(ending) < len(hanging):
            raise RuntimeError("the transaction is under way at a coordinator that is loading its state: try again")
        for each in ending:
            write_marker(admin, each)


def _row(each: OpenTransaction) -> dict[str, Any]:
    return {
        "topic": each.topic,
        "partition": each.partition,
        "first_offset": each.first,
        "transactional_id": each.transactional_id or "",
        "producer_id": each.producer_id,
        "state": each.state,
        "idle_s": round(max(0.0, time.time() - each.wrote_at / 1000), 1),
        "action": "hanging: `abort` writes its marker" if each.hangs else "none: its producer or the timeout ends it",
    }
