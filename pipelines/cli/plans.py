"""`laminar plans`: what placement has decided to move, and what that does to the load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from infra.kafka.reading import StoredRecord, last_records, read_topic
from infra.kafka.start_offset import StartOffset
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Printing
from pipelines.cli.output import Rows
from pipelines.cli.record_text import utc
from schemas.plain import to_plain
from schemas.records import RepackPlan
from schemas.topics import PLANS

app = Commands()
COLUMNS = ("plan_id", "reason", "policy_version", "planned_at", "moves")


@app.command()
def plans(
    address: Address,
    printing: Printing,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="The last so many plans.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
) -> Rows:
    """Show the moves that placement has planned, each with the KV use of both replicas before and after.

    \b
    Examples:
      laminar plans
      laminar plans --follow
      laminar plans -n 100 --json | jq '.moves | length'
    """
    to = address.connect()
    name = PLANS.name(to.run)

    def records() -> Iterator[StoredRecord]:
        if follow:  # a plan takes two offsets: its own, and that of its transaction's marker
            yield from read_topic(to.client, name, start=StartOffset(2 * count, from_end=True), follow=True)
        else:
            yield from last_records(to.client, name, count)

    rows = (row for record in records() for row in record.rows if isinstance(row, RepackPlan))
    parts = ([to_plain(row)] for row in rows)
    return Rows(parts, COLUMNS, printing.form("lines", json="jsonl"), line=plan_lines)


def plan_lines(plan: Any) -> str:
    """A plan in words: a line of its own, and one for each move."""
    before = {load["replica"]: load for load in plan["before"]}
    after = {load["replica"]: load for load in plan["after"]}
    lines = [f"{utc(plan['planned_at'])} plan {plan['plan_id']} ({plan['reason']}) under {plan['policy_version']}"]
    for move in plan["moves"]:
        ends = ", ".join(
            f"replica {replica} {_share(before[replica])} → {_share(after[replica])}"
            for replica in (move["source"], move["destination"])
        )
        many = len(move["trajectory_ids"])
        held = f"of {move['kv']} KV tokens" if move["kv"] else "not begun yet"
        what = f"{many} trajector{'y' if many == 1 else 'ies'} {held}"
        lines.append(f"  {move['source']} → {move['destination']}  {what}; KV use of {ends}")
    return "\n".join(lines)


def _share(load: dict[str, Any]) -> str:
    return f"{100 * load['kv_used'] / load['kv_capacity']:.0f} %" if load["kv_capacity"] else "-"
