"""`laminar topics dlq`: the records that could not be processed, and their replay to the topics they came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from infra.conditions.tables import table_condition
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges
from infra.kafka.topic_reader import StoredRecord, raw_decoder, read_partition, read_topic
from operators.export.columns import RecordRows, as_table, row_schema
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption, Printing
from pipelines.cli.repair import ExecuteOption
from pipelines.present.output import Report, RowOutput, utc
from schemas.block_codec import decode_as_blocks
from schemas.records import DRAW_PROMPTS, DeadLetter
from schemas.topics import CATALOGUE, DEAD_LETTERS

app = Commands(no_args_is_help=True)

COLUMNS = ("dead_letter", "failed_at", "step", "from", "bytes", "reason")
WhereOption = Annotated[
    str,
    typer.Option(
        "--where", "-w", metavar="CONDITION", help="For example: step = 'read experiences' and reason ~ 'schema'."
    ),
]


@app.callback()
def dead_letters() -> None:
    """List dead letters, and replay their records.

    \b
    Examples:
      laminar topics dlq list
      laminar topics dlq replay --execute
    """


@app.command("list")
def list_(address: Address, printing: Printing, where: WhereOption = "") -> RowOutput:
    """List a run's dead letters: the record, the step that could not process it, and the reason.

    \b
    Examples:
      laminar topics dlq list
      laminar topics dlq list -w "step = 'read experiences'" --json
    """
    connection = address.open_log()
    rows = [_row(record, letter) for record, letter in _letters(connection.client, connection.run, where)]
    return RowOutput([rows], COLUMNS, printing.form(), "no dead letters")


@app.command()
def replay(
    address: Address, where: WhereOption = "", execute: ExecuteOption = False, json: JsonOption = False
) -> Report:
    """Publish the records of dead letters again, to the topic and partition they came from. Dry run unless --execute.

    Fix the cause first. Each record is read at its original offset and keeps its key and headers. Consumers drop
    records that they have processed already, so a record that is sent twice counts once. Rows of prompts are passed
    over. Exits with 1 if retention has deleted one of the records.

    \b
    Examples:
      laminar topics dlq replay
      laminar topics dlq replay -w "reason ~ 'verifier'" --execute
    """
    connection = address.connect() if execute else address.open_log()
    found = [
        (letter, _original(connection.client, _topic_of(letter, connection.run), letter))
        for _, letter in _letters(connection.client, connection.run, where)
    ]
    if execute:
        with BoundedProducer(connection.client) as producer:
            for letter, original in found:
                if original is not None and original.rows[0] is not None:
                    producer.send(
                        original.topic,
                        original.rows[0],
                        key=original.key,
                        headers=original.headers,
                        partition=letter.partition,
                    )
    sent = "sent" if execute else "would be sent"
    rows = [
        {
            "from": f"{letter.topic} {letter.partition}:{letter.offset}",
            "bytes": original.size if original is not None else len(letter.payload),
            "action": _action(letter, original, sent),
        }
        for letter, original in found
    ]
    deleted = sum(original is None and letter.step != DRAW_PROMPTS for letter, original in found)
    hint = "" if execute or not rows else "\nDry run: nothing was sent. Use --execute."
    return Report(
        rows,
        lambda: (
            "\n".join(f"{row['from']}  {row['bytes']} bytes  {row['action']}" for row in rows) + hint
            if rows
            else "no dead letters"
        ),
        as_json=json,
        exit_code=1 if deleted else 0,
    )


def _letters(client: ClientProperties, run: str, where: str) -> Iterator[tuple[StoredRecord, DeadLetter]]:
    """Yield the dead letters of `run` that match `where`. Raises typer.BadParameter for an invalid condition."""
    try:
        condition = table_condition(where, row_schema(DEAD_LETTERS)) if where else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--where") from error
    for record in read_topic(client, DEAD_LETTERS.name(run), decoder=decode_as_blocks):
        if not record.rows or record.rows[0].kind is not DeadLetter:
            continue
        rows = [RecordRows.of_one(record.rows[0], record.offset, record.timestamp)]
        if condition is None or len(condition.rows(as_table(DEAD_LETTERS, record.partition, rows))):
            yield record, record.rows[0].records()[0]


def _action(letter: DeadLetter, original: StoredRecord | None, sent: str) -> str:
    if letter.step == DRAW_PROMPTS:
        return "none: a row of prompts"
    return "none: deleted by retention" if original is None else sent


def _topic_of(letter: DeadLetter, run: str) -> str:
    """Return the full name of the topic of `letter`."""
    return CATALOGUE[letter.topic].name(run) if letter.topic in CATALOGUE else letter.topic


def _original(client: ClientProperties, topic: str, letter: DeadLetter) -> StoredRecord | None:
    """Return the original record of `letter`, its value as its only row; None if `topic` does not have it any more, or
    the letter is of a row of prompts."""
    if letter.step == DRAW_PROMPTS:  # its topic is a file, or a task
        return None
    try:
        offsets = partition_ranges(client, topic).get(letter.partition)
    except UnknownTopic:
        return None
    if offsets is None or not offsets.beginning <= letter.offset < offsets.end:
        return None
    place = topic, letter.partition, letter.offset
    return next(read_partition(client, *place, letter.offset + 1, raw_decoder), None)


def _row(record: StoredRecord, letter: DeadLetter) -> dict[str, Any]:
    return {
        "dead_letter": f"{record.partition}:{record.offset}",
        "failed_at": utc(letter.failed_at),
        "step": letter.step,
        "from": f"{letter.topic} {letter.partition}:{letter.offset}",
        "bytes": len(letter.payload),
        "reason": letter.reason,
    }
