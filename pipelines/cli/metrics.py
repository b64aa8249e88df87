"""`laminar metrics`: serve a run's metrics to Prometheus."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.escaping import print_escaped
from infra.scratch import scratch_folder
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import RunClient, TransactionalAddress
from pipelines.cli.watch import attached, catch_up, local_run

if TYPE_CHECKING:
    from pipelines.run.background_audit import BackgroundAudit

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
    address: TransactionalAddress,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free port.")] = 9464,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    audit_every: Annotated[
        float,
        typer.Option(
            "--audit-every", min=0, metavar="SECONDS", help="Audit the run this often, and serve the result; 0: never."
        ),
    ] = 0.0,
) -> None:
    """Serve a run's metrics at /metrics in Prometheus format, until stopped. Joins no consumer group.

    infra/deploy/grafana.json is a Grafana dashboard of these metrics. Without --host only this machine can connect.
    With --audit-every the run is audited in the background, as `laminar run` does with its own: for runs whose roles
    are deployed or submitted in the foreground. A failure is printed, and laminar_audit_passed is 0.
    laminar_audit_passed keeps its value until another audit ends: laminar_audit_timestamp_seconds is the time of the
    last end.

    \b
    Examples:
      laminar metrics serve
      laminar metrics serve --run first --host 0.0.0.0 --port 9464
      laminar metrics serve --run first -b kafka:9092 --audit-every 600
    """
    from prometheus_client import CollectorRegistry

    from pipelines.present.view.exposition import RunCollector, serving_metrics

    connection, local = address.open_log(), local_run(address)
    with attached(connection, local) as watching, ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: temporary files are removed
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                stack.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
        catch_up(watching)
        registry, audit = CollectorRegistry(), dict[str, Any]()
        registry.register(RunCollector(lambda: watching.state, lambda: dict(audit)))
        try:
            bound = stack.enter_context(serving_metrics(registry, host, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own text repeats the address
            raise RuntimeError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
        shown = f"[{host}]" if ":" in host else host
        print_escaped(f"serving the metrics of run {connection.run} at http://{shown}:{bound}/metrics", err=True)
        audits = None
        if audit_every and connection.client.log is None:  # an ended run has the audit of its end
            audits = stack.enter_context(_audits(address, connection, audit_every, audit.update))
        while True:
            watching.tick()
            if audits is not None:
                audits.poll()
            time.sleep(POLL_S)


@contextmanager
def _audits(
    address: TransactionalAddress,
    connection: RunClient,
    every_s: float,
    report: Callable[[Mapping[str, Any]], None],
) -> Iterator[BackgroundAudit]:
    """Background audits of the run, with a configuration that names it, its Kafka and how long a transaction may be
    open.
    """
    import tomli_w

    from pipelines.inspect.run_files import CONFIG_FILE, LOGS
    from pipelines.present.progress import print_error_line
    from pipelines.run.background_audit import BackgroundAudit

    properties = str(address.command_config.absolute()) if address.command_config else ""
    kafka: dict[str, Any] = {"bootstrap_servers": connection.client.bootstrap_servers, "client_properties": properties}
    kafka["transaction_timeout_s"] = address.transaction_timeout_s
    with scratch_folder("laminar-audit-") as folder:
        file = folder / CONFIG_FILE
        (file.parent / LOGS).mkdir()
        file.write_text(tomli_w.dumps({"run": {"name": connection.run}, "kafka": kafka}), "utf-8")
        with closing(BackgroundAudit(file, every_s, print_error_line, report)) as audits:
            yield audits
