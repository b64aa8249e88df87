"""`laminar watch`: watch a run live, on any machine that reaches its Kafka."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from infra.clocks import wall_ms
from infra.escaping import print_escaped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption, RunClient, RunStarting
from pipelines.inspect.run_folders import RUNS
from pipelines.inspect.run_state.local_run import in_phase, started_run, stopped_run
from pipelines.inspect.run_state.state import FIRST_PHASES, RunState, fold_all, new_run
from pipelines.present.output import Report
from pipelines.present.view.state_json import state_to_json
from pipelines.present.view.text import phase_name
from pipelines.present.view.watch import Watch
from schemas.topics import METRICS, REPLICAS

if TYPE_CHECKING:
    from pipelines.inspect.run_folders import RunFolder
    from pipelines.present.view.live import LiveView

app = Commands()
CATCH_UP_TIMEOUT_S = 5.0
"""After this time without new records the snapshot is taken as it is."""
MAX_HEARTBEATS = 200
REFRESH_S = 0.5

BEFORE_ROLES = (*FIRST_PHASES, "warm start", "starting")
"""The phases in which a run may have no topics yet."""


@app.command()
def watch(
    address: Address,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print one snapshot, as if the output were not a terminal.")
    ] = False,
    json: JsonOption = False,
) -> Report | None:
    """Watch a run: reward, accuracy, staleness, speed, lag, replicas. Joins no consumer group; works on any machine.

    On a terminal the view is redrawn until you press Ctrl-C; otherwise, and of a stopped run, one snapshot is printed.
    Of a run that is starting on this machine, it waits for the topics.

    \b
    Examples:
      laminar watch
      laminar watch --run first -b kafka:9092
      laminar watch --json | jq .reward
    """
    connection, local = _connect(address)
    with attached(connection, local) as watching:
        state = catch_up(watching)
        ended = local is not None and not local.supervised and local.status != "running"
        stopped = connection.client.log is not None or ended
        if local is not None and stopped:
            state = ended_state(state, local)
        if json or plain or stopped or not sys.stdout.isatty():
            return Report(state_to_json(state), lambda: _snapshot(state), as_json=json)
        from pipelines.present.view.console import console
        from pipelines.present.view.live import LiveView

        with suppress(KeyboardInterrupt), LiveView(console(), connection.run) as view:
            follow(watching, view)
    return None


def _connect(address: Address) -> tuple[RunClient, RunFolder | None]:
    """Return the run's Kafka and its folder on this machine; while the run starts, wait until it has its topics."""
    from infra.kafka.ranges import UnknownTopic, partition_ranges
    from infra.kafka.readiness import BrokerUnreachable

    printed = ""
    while True:
        local = local_run(address)
        phase = local.state["phase"] if local is not None and local.status == "running" else ""
        try:
            if local is not None and local.supervised and phase in FIRST_PHASES:
                raise RunStarting(f"run {local.run} is starting")  # its log has nothing new, or is that before a resume
            connection = address.open_log()
            partition_ranges(connection.client, REPLICAS.name(connection.run))
            return connection, local
        except (RunStarting, UnknownTopic, BrokerUnreachable) as error:
            if local is None or local.status != "running":
                raise
            starts = phase in BEFORE_ROLES if local.supervised else not isinstance(error, BrokerUnreachable)
            if not starts:
                raise
            line = f"waiting for the topics of run {local.run}, which is starting: {phase_name(local.state['phase'])}"
        if line != printed:
            print_escaped(line, err=True)
            printed = line
        time.sleep(REFRESH_S)


def follow(watching: Watch, view: LiveView) -> NoReturn:
    """Show each new state in `view` until an exception, such as KeyboardInterrupt, ends it."""
    while True:
        view.update(watching.tick())
        time.sleep(REFRESH_S)


@contextmanager
def attached(connection: RunClient, local: RunFolder | None = None) -> Iterator[Watch]:
    """Yield a watch on a run of any machine, which starts from the run's last heartbeats; `local`: its folder here."""
    from infra.kafka.observer import Observer
    from infra.kafka.topic_reader import last_records
    from pipelines.inspect.run_state.refused import refused

    records = last_records(connection.client, REPLICAS.name(connection.run), MAX_HEARTBEATS)
    rows = (row for record in records for row in record.rows if isinstance(row, REPLICAS.record_classes))
    heartbeats: list[Any] = [row for row in rows if refused(row, False) is None]
    begin = _start_time(connection, local, heartbeats)
    with Observer(connection.client, connection.run, refuse=refused) as source:
        if local is None:
            started = new_run(connection.run, None, begin)
        elif local.supervised:
            started = in_phase(started_run(local), local)
        else:  # its times are in the log: those of its folder are of the last resume
            started = replace(started_run(local), started_at=begin, now=begin)
        yield Watch(fold_all(started, heartbeats), source=source)


def catch_up(watching: Watch) -> RunState:
    """Read the log up to its end and return the state; stop earlier after `CATCH_UP_TIMEOUT_S` without change."""
    state, changed_at = watching.tick(), time.monotonic()
    while watching.source is not None and not watching.source.caught_up():
        if time.monotonic() - changed_at >= CATCH_UP_TIMEOUT_S:
            break
        time.sleep(0.005)
        newest = watching.tick()
        if replace(newest, now=state.now) != state:
            state, changed_at = newest, time.monotonic()
    return watching.state


def ended_state(state: RunState, run: RunFolder) -> RunState:
    """Return `state` at the end of `run` of this machine, with the figures of the whole run."""
    from pipelines.cli.report import metrics_of
    from pipelines.present.report.series import whole_run

    metrics = metrics_of(run, str(run.folder.absolute()), RUNS)
    return replace(stopped_run(state, run), whole=whole_run(metrics))


def local_run(address: Address) -> RunFolder | None:
    """Return the folder of a run of this machine; None for another."""
    from pipelines.inspect.run_folders import find_run

    return None if address.folder is None else find_run(address.folder.parent, address.folder.name)


def _start_time(connection: RunClient, local: RunFolder | None, heartbeats: Iterable[Any]) -> int:
    """Return the earliest known time of the run: of its folder, its first metric that is kept, and `heartbeats`."""
    from infra.kafka.topic_reader import read_topic
    from pipelines.inspect.run_state.refused import refused

    metrics = read_topic(connection.client, METRICS.name(connection.run))
    counted = (each for each in metrics if any(refused(row, each.transactional) is None for row in each.rows))
    first = next(counted, None)
    times = [each.sent_at for each in heartbeats]
    times += [first.timestamp] if first is not None else []
    times += [int(1000 * local.started_at)] if local is not None and local.started_at else []
    return min(times, default=wall_ms())


def _snapshot(state: RunState) -> Any:
    from rich.constrain import Constrain

    from pipelines.present.view.panels import screen

    return Constrain(screen(state, 100, 40), 100)
