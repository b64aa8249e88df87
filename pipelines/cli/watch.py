"""`laminar watch`: a run as it goes, wherever it is, from its Kafka alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Connection, JsonOption
from pipelines.inspect.run_state.state import RunState, fold_all, new_run
from pipelines.present.output import Report
from pipelines.present.view.figures import figures
from pipelines.present.view.watch import Watch
from schemas.topics import REPLICAS

app = Commands()
PATIENCE_S = 5.0
"""So long without news, and what has been heard must do."""
BEATS = 200


@app.command()
def watch(
    address: Address,
    plain: Annotated[bool, typer.Option("--plain", help="One snapshot, as where the output is no terminal.")] = False,
    json: JsonOption = False,
) -> Report | None:
    """Watch a run: reward, accuracy, staleness, speed, lag, replicas. Joins no group; works from any machine.

    On a terminal it is redrawn until you leave it (q); else it is one snapshot.

    \b
    Examples:
      laminar watch
      laminar watch --run first -b kafka:9092
      laminar watch --json | jq .reward
    """
    to = address.connect()
    with attached(to) as watching:
        state = catch_up(watching)
        if json or plain or not sys.stdout.isatty():
            return Report(figures(state), lambda: _snapshot(state), as_json=json)
        from pipelines.present.view.app import WatchApp

        WatchApp(to.run, watching.tick).run()
    return None


@contextmanager
def attached(to: Connection) -> Iterator[Watch]:
    """A watch on a run that may be elsewhere; the last heartbeats are known to it at once."""
    from infra.kafka.observe import Observer
    from infra.kafka.reading import last_records

    beats: list[Any] = [row for record in last_records(to.client, REPLICAS.name(to.run), BEATS) for row in record.rows]
    with Observer(to.client, to.run) as source:
        yield Watch(fold_all(new_run(to.run, None, 0), beats), source=source)


def catch_up(watching: Watch) -> RunState:
    """What the log says by now."""
    known, since = watching.tick(), time.monotonic()
    while watching.source is not None and not watching.source.caught_up() and time.monotonic() - since < PATIENCE_S:
        time.sleep(0.005)
        state = watching.tick()
        if replace(state, now=known.now) != known:
            known, since = state, time.monotonic()
    watching.state = replace(watching.state, started_at=_began(watching.state))
    return watching.state


def _began(state: RunState) -> int:
    """The first time that is known of a run that nobody here has started."""
    told = [pace.at for pace in state.pace] + [each.sent_at for each in state.replicas.values()]
    return min(told, default=state.now)


def _snapshot(state: RunState) -> Any:
    from pipelines.present.view.panels import screen

    return screen(state, 100, 40)
