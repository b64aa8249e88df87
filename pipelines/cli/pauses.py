"""`laminar runs pause` and `unpause`: stop the assignment of work in a run that is under way, and continue it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.clocks import wall_ms
from pipelines.cli.options import Address, JsonOption, RunClient
from pipelines.present.output import Report

if TYPE_CHECKING:
    from schemas.records import Metric, Pause

CONFIRM_S = 15.0
"""How long placement may take to confirm a request. A restart takes a few seconds."""
POLL_S = 0.2


def pause_command(
    address: Address,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for others who look at the run.")] = "",
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="Wait until no trajectory is running."),
    ] = 0.0,
    json: JsonOption = False,
) -> Report:
    """Pause a run: no further trajectory begins. Running ones finish, are scored, and are trained once a batch is full.

    The processes keep running and the GPUs become idle. The pause survives restarts, also `laminar runs stop` and
    `resume`, until `laminar runs unpause`. The command returns once placement has confirmed: from then on nothing is
    assigned. With --wait, exits with 1 if trajectories are still running after that time.

    \b
    Examples:
      laminar runs pause
      laminar runs pause --run first --reason "new switches" --wait 3600
    """
    return _request(address, True, reason, wait, json)


def unpause_command(
    address: Address,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for others who look at the run.")] = "",
    json: JsonOption = False,
) -> Report:
    """End the pause of a run: placement assigns the work that waits.

    \b
    Examples:
      laminar runs unpause
      laminar runs unpause --run first
    """
    return _request(address, False, reason, 0.0, json)


def _request(address: Address, paused: bool, reason: str, wait: float, json: bool) -> Report:
    """Write the request if it changes anything, and wait for placement. Raises RuntimeError for a run of an earlier
    release that has no topic for it."""
    from infra.kafka.observer import Observer
    from infra.kafka.ranges import UnknownTopic
    from pipelines.inspect.log.pauses import newest_pause
    from pipelines.inspect.run_state.refused import refused
    from schemas.records.status import MAX_PAUSE_TEXT
    from schemas.topics import METRICS, RELAY

    if len(reason) > MAX_PAUSE_TEXT:
        raise typer.BadParameter(f"{len(reason)} characters are more than {MAX_PAUSE_TEXT}", param_hint="--reason")
    connection = address.connect()
    runs_here = _runs_here(address)
    try:
        before = newest_pause(connection.client, connection.run)
    except UnknownTopic as error:
        raise RuntimeError(
            f"{error}: run {connection.run} was started by an earlier release; it gets the topic at its next start"
        ) from None
    changes = paused != (before is not None and before.paused)
    ends = {METRICS.short_name: math.inf, RELAY.short_name: math.inf}
    positions = ends if changes else None
    with Observer(connection.client, connection.run, positions=positions, refuse=refused) as observer:
        request = _write(connection, before, paused, reason) if changes else before
        patience = 0.0 if request is None or runs_here is False or not (changes or wait) else max(CONFIRM_S, wait)
        metric = None if request is None else _confirmation(observer, request, patience, wait)
    values = {} if metric is None else {name: int(value) for name, value in metric.values.items()}
    running = values.get("running")
    data = {
        "run": connection.run,
        "paused": paused,
        "changed": changes,
        "number": request and request.number,
        "requested_by": request and request.requested_by,
        "reason": request and request.reason,
        "requested_at": request and request.requested_at,
        "confirmed": metric is not None,
        "running": running,
        "waiting": values.get("waiting"),
    }
    late = wait > 0 and running != 0
    return Report(data, lambda: "\n".join(_lines(data, late, runs_here, address)), json, exit_code=1 if late else 0)


def _runs_here(address: Address) -> bool | None:
    """Whether the processes of a run of this machine run; None for a run that may run elsewhere."""
    from pipelines.inspect.run_folders import read_run

    folder = address.folder
    if folder is None or address.given:
        return None
    return read_run(folder).status == "running"


def _write(connection: RunClient, before: Pause | None, paused: bool, reason: str) -> Pause:
    from infra.kafka.producer import BoundedProducer
    from schemas.codec import encode
    from schemas.records import Pause
    from schemas.topics import CONTROL, PAUSE

    number = 1 if before is None else before.number + 1
    request = Pause(number, paused, _requester(), reason, wall_ms())
    value, headers = encode(request)
    with BoundedProducer(connection.client) as producer:
        producer.send(CONTROL.name(connection.run), value, key=PAUSE.encode(), headers=headers, partition=0)
    return request


def _requester() -> str:
    """Return user and host of this process."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _confirmation(observer: Any, request: Pause, patience: float, wait: float) -> Metric | None:
    """Return placement's newest metric about `request`, or about a later one; with `wait` once nothing is running.

    None if there is none after `patience` seconds.
    """
    from schemas.records import Metric
    from schemas.topics import PAUSE

    if not patience:
        return None
    deadline, found = time.monotonic() + patience, None
    while True:
        for row in observer.poll(POLL_S):
            if isinstance(row, Metric) and row.name == PAUSE and row.step >= request.number:
                found = row
        if (found is not None and (not wait or not found.values.get("running"))) or time.monotonic() > deadline:
            return found


def _lines(data: dict[str, Any], late: bool, runs_here: bool | None, address: Address) -> Iterator[str]:
    from pipelines.present.output import utc

    run, asked = data["run"], data["requested_by"]
    if data["number"] is None or not (data["changed"] or data["paused"]):
        yield f"run {run} is not paused"
    elif not data["paused"]:
        yield f"run {run} continues" if data["confirmed"] else f"the pause of run {run} is ended"
    else:
        since = f"since {utc(data['requested_at'])} UTC, by {asked}" + (f": {data['reason']}" if data["reason"] else "")
        yield f"run {run} is paused {since}"
    if data["paused"] and data["confirmed"]:
        text = f"{data['running']} trajectories are running"
        yield f"  {text} still; they finish" if late else f"  {text}"
        if data["waiting"]:
            yield f"  {data['waiting']} more of a prompt that has begun wait for the end of the pause"
    elif data["changed"] and runs_here is False:
        yield f"  its processes are stopped: this takes effect at `{address.command('runs resume')}`"
    elif data["changed"] and not data["confirmed"]:
        yield f"  placement has not confirmed it within {CONFIRM_S:g} s: it takes effect once placement has read it"
