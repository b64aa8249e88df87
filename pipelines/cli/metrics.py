"""`laminar metrics`: serve a run's metrics to Prometheus."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Annotated

import typer

from infra.escaping import print_escaped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address
from pipelines.cli.watch import attached, catch_up, local_run

app = Commands(no_args_is_help=True)
POLL_S = 0.5


@app.callback()
def metrics() -> None:
    """Serve a run's metrics to other tools.

    \b
    Examples:
      laminar metrics serve --port 9464
    """


@app.command()
def serve(
    address: Address,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free port.")] = 9464,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve a run's metrics at /metrics in Prometheus format, until stopped. Joins no consumer group.

    infra/deploy/grafana.json is a Grafana dashboard of these metrics. Without --host only this machine can connect.

    \b
    Examples:
      laminar metrics serve
      laminar metrics serve --run first --host 0.0.0.0 --port 9464
    """
    from prometheus_client import CollectorRegistry

    from pipelines.present.view.exposition import RunCollector, serving_metrics

    connection, local = address.open_log(), local_run(address)
    with attached(connection, local) as watching, ExitStack() as stack:
        catch_up(watching)
        registry = CollectorRegistry()
        registry.register(RunCollector(lambda: watching.state))
        try:
            bound = stack.enter_context(serving_metrics(registry, host, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own text repeats the address
            raise RuntimeError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
        shown = f"[{host}]" if ":" in host else host
        print_escaped(f"serving the metrics of run {connection.run} at http://{shown}:{bound}/metrics", err=True)
        while True:
            watching.tick()
            time.sleep(POLL_S)
