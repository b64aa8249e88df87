"""`laminar plans`: what placement has decided to move, what that does to the load, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any

import typer

from infra.kafka.properties import ClientProperties
from infra.kafka.reading import StoredRecord, decoded, last_records, read_topic, undecoded
from infra.kafka.start_offset import StartOffset
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Printing
from pipelines.present.output import RowOutput, utc
from schemas.codec import record_type
from schemas.plain import to_plain
from schemas.records import MoveOutcome, RepackPlan
from schemas.topics import PLANS

app = Commands()
COLUMNS = ("plan_id", "reason", "policy_version", "planned_at", "moves")
FIRST_LOOK = 1000
"""Records of the topic that are looked at, not decoded, before it is known how many are no plans."""
OUTCOMES = {
    "handed_over": "handed over",
    "finished": "finished before",
    "rejected": "rejected",
    "lost": "lost to a replica that was gone",
}
"""What may become of a trajectory that is to move, and how it is told."""


@app.command()
def plans(
    address: Address,
    printing: Printing,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="The last so many plans.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
) -> RowOutput:
    """Show the moves that placement has planned, the KV use of both replicas before and after, and what became of them.

    A trajectory that was to move was handed over (made), had finished before, stayed as nobody kept room for it or let
    it go in time (refused), or went on elsewhere because one of the two replicas was gone (lost). What is not known yet
    is open. What becomes known with --follow comes as a row of its own.

    \b
    Examples:
      laminar plans
      laminar plans --follow
      laminar plans -n 100 --json | jq '[.moves[].handed_over | length] | add'
    """
    to = address.connect()
    name = PLANS.name(to.run)
    known = _since_plan(to.client, name, count)
    rows: Iterator[dict[str, Any]] = _joined(row for record in known for row in record.rows)
    if follow:
        after = StartOffset(known[-1].offset + 1) if known else StartOffset(0, from_end=True)
        coming = read_topic(to.client, name, start=after, follow=True)
        rows = chain(rows, (_alone(row) for record in coming for row in record.rows))
    return RowOutput(([row] for row in rows), COLUMNS, printing.form("lines", json="jsonl"), line=plan_lines)


def _since_plan(client: ClientProperties, name: str, count: int) -> list[StoredRecord]:
    """The newest `count` plans, and all that was written after the first of them."""
    looked, kind = max(FIRST_LOOK, 2 * count), record_type(RepackPlan).schema
    while True:
        found = last_records(client, name, looked, decoder=undecoded)
        plans = [place for place, record in enumerate(found) if record.schema == kind]
        if len(plans) >= count or len(found) < looked:
            return decoded(found[plans[-count] if len(plans) >= count else 0 :]) if count else []
        looked *= 4


def _joined(rows: Iterable[RepackPlan | MoveOutcome]) -> Iterator[dict[str, Any]]:
    """Plans, each of whose moves says which of its trajectories met which outcome, and of which nothing is known."""
    listed = list(rows)
    ends: dict[str, list[MoveOutcome]] = {}
    for row in listed:
        if isinstance(row, MoveOutcome):
            ends.setdefault(row.plan_id, []).append(row)
    for row in listed:
        if isinstance(row, RepackPlan):
            plan = to_plain(row)
            for move in plan["moves"]:
                move |= _outcomes(move["trajectory_ids"], ends.get(row.plan_id, ()))
            yield plan


def _outcomes(names: Sequence[str], ends: Sequence[MoveOutcome]) -> dict[str, list[str]]:
    met = {name: outcome for end in reversed(ends) for outcome in OUTCOMES for name in getattr(end, outcome)}
    return {outcome: [name for name in names if met.get(name, "open") == outcome] for outcome in (*OUTCOMES, "open")}


def _alone(row: RepackPlan | MoveOutcome) -> dict[str, Any]:
    """A plan of which nothing is known yet, or what has become of a move since it was planned."""
    if isinstance(row, RepackPlan):
        return next(_joined([row]))
    end = to_plain(row)
    move = {name: end.pop(name) for name in ("source", "destination", *OUTCOMES)}
    return {**end, "reason": "ended", "policy_version": None, "planned_at": None, "moves": [move]}


def plan_lines(plan: Any) -> str:
    """A plan in words, a line of its own and one for each move; or what has become of one."""
    if "ended_at" in plan:
        (move,) = plan["moves"]
        said = f"{move['source']} → {move['destination']}  {_told(move)}"
        return f"{utc(plan['ended_at'])} plan {plan['plan_id']}: {said}"
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
        became = f"; {told}" if (told := _told(move)) else ""
        lines.append(f"  {move['source']} → {move['destination']}  {what}; KV use of {ends}{became}")
    return "\n".join(lines)


def _told(row: Any) -> str:
    """How many trajectories met which outcome."""
    return ", ".join(
        f"{len(row[outcome])} {said}" for outcome, said in {**OUTCOMES, "open": "open"}.items() if row.get(outcome)
    )


def _share(load: dict[str, Any]) -> str:
    return f"{100 * load['kv_used'] / load['kv_capacity']:.0f} %" if load["kv_capacity"] else "-"
