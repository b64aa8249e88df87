"""`laminar runs`: manage and audit runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli import compare, delete, drain, local_runs, logs, pauses, resume, stop, trim, upgrade
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption
from pipelines.inspect.audit.result import STAGES, Audit
from pipelines.present.output import Report

if TYPE_CHECKING:
    from schemas.records import TrimPoint

app = Commands(no_args_is_help=True)
MAX_NAMES = 20


@app.callback()
def runs() -> None:
    """List, pause, resume, stop, audit, trim and delete runs.

    \b
    Examples:
      laminar runs list
      laminar runs status
      laminar runs resume
      laminar runs pause
      laminar runs audit --run first
      laminar runs trim
      laminar runs delete first
    """


app.command("list")(local_runs.list_command)
app.command("status")(local_runs.status_command)
app.command("stop")(stop.stop_command)
app.command("pause")(pauses.pause_command)
app.command("unpause")(pauses.unpause_command)
app.command("logs")(logs.logs_command)
app.command("resume")(resume.resume_command)
app.command("drain")(drain.drain_command)
app.command("compare")(compare.compare_command)
app.command("trim")(trim.trim_command)
app.command("delete")(delete.delete_command)
app.command("upgrade")(upgrade.upgrade_command)


@app.command()
def audit(
    address: Address,
    ended: Annotated[bool, typer.Option("--ended", help="The run has ended: list what is still in flight.")] = False,
    json: JsonOption = False,
) -> Report:
    """Verify from the raw topics that no trajectory was lost or trained twice. Exits with 1 if the audit failed.

    After `laminar runs trim` the audit begins at the newest trim point, and adds the counts in that trim point.

    \b
    Examples:
      laminar runs audit
      laminar runs audit --run first --ended --json | jq .named.lost
    """
    from pipelines.inspect.audit.audit_run import audit as audit_run
    from pipelines.inspect.audit.trim_points import newest_trim_point

    connection = address.open_log()
    timeout_s = address.transaction_timeout_s
    found = audit_run(connection.client, connection.run, ended=ended, transaction_timeout_s=timeout_s)
    trim_point = newest_trim_point(connection.client, connection.run)  # the audit may have begun again at a new one
    begins_at = trim_point and {
        "trim_point": trim_point.number,
        "version": str(trim_point.version),
        "trimmed_at": trim_point.trimmed_at,
    }
    return Report(
        found.to_json() | {"begins_at": begins_at},
        lambda: "\n".join([*_lines(connection.run, found), *([] if trim_point is None else [_trim_line(trim_point)])]),
        as_json=json,
        exit_code=0 if found.passed else 1,
    )


def _lines(run: str, audit: Audit) -> Iterator[str]:
    numbers = audit.numbers()
    yield f"run {run}: " + ("the audit passed: no trajectory lost or trained twice" if audit.passed else "AUDIT FAILED")
    yield f"  {numbers['dispatched']:>10}  dispatched"
    if audit.undispatched:
        yield f"  {audit.undispatched:>10}  without dispatch"
    for name in ("trained", "untrained", "dropped", "failed", "evaluated", "imported", "in_flight", "expired", "lost"):
        if numbers[name] or name not in ("untrained", "imported", "expired"):
            yield f"  {numbers[name]:>10}  = {name.replace('_', ' ')}{_stages(audit) if name == 'in_flight' else ''}"
    for name in ("duplicate_finishes", "settled_again", "undecodable"):
        if numbers[name]:
            yield f"  {numbers[name]:>10}  {name.replace('_', ' ')}, not counted"
    for stage in STAGES:
        yield from _named(f"lost at {stage}", (each.trajectory_id for each in audit.lost if each.stage == stage))
    yield from _named("trained twice", audit.trained_twice)
    yield from _named("dropped without a reason", audit.without_reason)
    yield from _named("trained, though settled as something else", audit.contradictions)
    for stage in STAGES:
        waiting = (each.trajectory_id for each in audit.still_in_flight if each.stage == stage)
        yield from _named(f"still in flight at {stage}", waiting)


def _trim_line(trim_point: TrimPoint) -> str:
    counted = dict(zip(trim_point.count_names, trim_point.counts, strict=True))
    ended = counted["dispatched"] + counted["undispatched"]
    source = f"trim point {trim_point.number}"
    return f"the log begins at version {trim_point.version}: {ended:,} of these trajectories are counts of {source}"


def _stages(audit: Audit) -> str:
    stages = [f"{audit.in_flight[stage]} at {stage}" for stage in STAGES if audit.in_flight.get(stage)]
    return f" ({', '.join(stages)})" if stages else ""


def _named(what: str, names: Iterable[str]) -> Iterator[str]:
    rest = iter(names)
    shown = list(islice(rest, MAX_NAMES))
    more = sum(1 for _ in rest)
    if shown:
        yield f"{what}: {', '.join(shown)}{f' and {more} more (--json lists all)' if more else ''}"
