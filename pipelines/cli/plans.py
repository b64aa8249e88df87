"""`laminar plans`: placement's plans, the load before and after each, and the outcome of each move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from infra.kafka.offset_span import Edge
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import StoredRecord, decode_stored, last_records, raw_decoder, read_topic
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, FollowOption, LastOption, Printing
from pipelines.present.output import RowOutput, utc
from schemas.codec import record_type
from schemas.plain import to_plain
from schemas.records import GroupPlan, MoveOutcome, RepackPlan
from schemas.topics import PLANS

app = Commands()
COLUMNS = ("plan_id", "reason", "policy_version", "planned_at", "moves")
FIRST_READ = 1000
"""Records read, without decoding, in the first attempt to find enough plans among the topic's last records."""
OUTCOMES = {
    "handed_over": "handed over",
    "finished": "finished before",
    "rejected": "rejected",
    "lost": "lost with a replica",
}
"""The outcomes of a planned move of a trajectory, and their texts."""


@app.command()
def plans(address: Address, printing: Printing, count: LastOption = 10, follow: FollowOption = False) -> RowOutput:
    """Show placement's planned moves, the KV use of both replicas before and after, and the outcome of each trajectory.

    Outcomes: `handed over`; `finished before` the move; `rejected`, so it stays (no room was reserved, or it was not
    released in time); `lost with a replica`, so it continues on another replica; `open`, not known yet. With --follow
    each new outcome is a row of its own. Groups of replicas that run a version in stages while it arrives are listed
    as plans without moves.

    \b
    Examples:
      laminar plans
      laminar plans --follow
      laminar plans -n 100 --json | jq '[.[].moves[].handed_over | length] | add'
    """
    connection = address.open_log()
    name = PLANS.name(connection.run)
    records = _since_plan(connection.client, name, count)
    rows: Iterator[dict[str, Any]] = _plans_with_outcomes(row for record in records for row in record.rows)
    if follow:
        after = Edge("offset", records[-1].offset + 1) if records else Edge("end", 0)
        new = read_topic(connection.client, name, start=after, follow=True)
        rows = chain(rows, (_single_row(row) for record in new for row in record.rows))
    none = f"run {connection.run} has no plans: no trajectory was moved"
    form = printing.form("lines", follow=follow)
    return RowOutput(([row] for row in rows), COLUMNS, form, none, line=plan_lines, schema=_schema)


def _schema() -> Any:
    """The columns of plans, of stage groups and of outcomes, for Arrow and CSV."""
    import pyarrow as pa

    number, text, texts = pa.int64(), pa.string(), pa.list_(pa.string())
    numbers = dict.fromkeys(("source", "destination", "kv_tokens"), number)
    move = pa.struct({**numbers, **dict.fromkeys(("trajectory_ids", *OUTCOMES, "open"), texts)})
    load = pa.struct(dict.fromkeys(("replica", "kv_used", "kv_capacity", "requests"), number))
    stage = pa.struct({**dict.fromkeys(("replica", "incarnation", "first", "end"), number), "address": text})
    plan = {"plan_id": text, "reason": text, "policy_version": text, "planned_at": number, "moves": pa.list_(move)}
    ended = {"before": pa.list_(load), "after": pa.list_(load), "ended_at": number}
    group = {"stages": pa.list_(stage), "replaces": text, "seconds_left": pa.float64(), "note": text}
    return pa.schema({**plan, **ended, **group})


def _since_plan(client: ClientProperties, name: str, count: int) -> list[StoredRecord]:
    """Return the newest `count` plans, and all records after the first of them."""
    limit, kinds = max(FIRST_READ, 2 * count), {record_type(kind).schema for kind in (RepackPlan, GroupPlan)}
    while True:
        found = last_records(client, name, limit, decoder=raw_decoder)
        plans = [index for index, record in enumerate(found) if record.schema in kinds]
        if len(plans) >= count or len(found) < limit:
            return decode_stored(found[plans[-count] if len(plans) >= count else 0 :]) if count else []
        limit *= 4


def _plans_with_outcomes(rows: Iterable[RepackPlan | MoveOutcome | GroupPlan]) -> Iterator[dict[str, Any]]:
    """Yield the plans, each move with its trajectories by outcome; `open` are those without one yet. Plans of stage
    groups have no moves."""
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
        elif isinstance(row, GroupPlan):
            yield _group_row(row)


def _group_row(row: GroupPlan) -> dict[str, Any]:
    """Return the row of a stage group."""
    plan = to_plain(row)
    return {"plan_id": plan.pop("group"), "reason": f"stages {plan.pop('action')}", **plan, "moves": []}


def _outcomes(names: Sequence[str], ends: Sequence[MoveOutcome]) -> dict[str, list[str]]:
    known = {name: outcome for end in reversed(ends) for outcome in OUTCOMES for name in getattr(end, outcome)}
    return {outcome: [name for name in names if known.get(name, "open") == outcome] for outcome in (*OUTCOMES, "open")}


def _single_row(row: RepackPlan | MoveOutcome | GroupPlan) -> dict[str, Any]:
    """Return the row of a new plan, whose outcomes are all open, of the outcome of one move, or of a stage group."""
    if isinstance(row, GroupPlan):
        return _group_row(row)
    if isinstance(row, RepackPlan):
        return next(_plans_with_outcomes([row]))
    end = to_plain(row)
    move = {name: end.pop(name) for name in ("source", "destination", *OUTCOMES)}
    return {**end, "reason": "ended", "policy_version": None, "planned_at": None, "moves": [move]}


def plan_lines(plan: Any) -> str:
    """Return a plan as text: a line for the plan and one for each move; or one line for the outcome of a move."""
    if "ended_at" in plan:
        (move,) = plan["moves"]
        text = f"{move['source']} → {move['destination']}  {_outcome_counts(move)}"
        return f"{utc(plan['ended_at'])} plan {plan['plan_id']}: {text}"
    if "stages" in plan:
        return _group_line(plan)
    before = {load["replica"]: load for load in plan["before"]}
    after = {load["replica"]: load for load in plan["after"]}
    lines = [
        f"{utc(plan['planned_at'])} plan {plan['plan_id']} ({plan['reason']}), policy version {plan['policy_version']}"
    ]
    for move in plan["moves"]:
        use = ", ".join(
            f"replica {replica} {_share(before[replica])} → {_share(after[replica])}"
            for replica in (move["source"], move["destination"])
        )
        number = len(move["trajectory_ids"])
        kv = f"with {move['kv_tokens']} KV tokens" if move["kv_tokens"] else "not started"
        what = f"{number} trajector{'y' if number == 1 else 'ies'} {kv}"
        outcomes = f"; {counts}" if (counts := _outcome_counts(move)) else ""
        lines.append(f"  {move['source']} → {move['destination']}  {what}; KV use of {use}{outcomes}")
    return "\n".join(lines)


def _group_line(plan: Any) -> str:
    stages = ", ".join(f"replica {each['replica']} layers {each['first']}-{each['end'] - 1}" for each in plan["stages"])
    text = f"{utc(plan['planned_at'])} group {plan['plan_id']} ({plan['reason']}), policy version "
    text += f"{plan['policy_version']}: {stages}"
    if plan["replaces"]:
        text += f"; replaces {plan['replaces']}"
    if plan["seconds_left"] >= 0:
        text += f"; whole in {plan['seconds_left']:.0f} s"
    return text + (f"; {plan['note']}" if plan["note"] else "")


def _outcome_counts(row: Any) -> str:
    """Return the number of trajectories of each outcome."""
    return ", ".join(
        f"{len(row[outcome])} {text}" for outcome, text in {**OUTCOMES, "open": "open"}.items() if row.get(outcome)
    )


def _share(load: dict[str, Any]) -> str:
    return f"{100 * load['kv_used'] / load['kv_capacity']:.0f} %" if load["kv_capacity"] else "-"
