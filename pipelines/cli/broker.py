"""`laminar broker`: a local Kafka broker that keeps running between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from infra.escaping import print_escaped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption
from pipelines.present.output import Report

app = Commands(no_args_is_help=True)

DEFAULT_FOLDER = "~/.local/share/laminar/broker"


def _default_folder() -> Path:
    try:
        return Path(DEFAULT_FOLDER).expanduser()
    except RuntimeError as error:
        raise typer.BadParameter("this user has no home directory: name a folder, or set LAMINAR_BROKER") from error


FolderOption = Annotated[
    Path,
    typer.Option(
        "--folder",
        metavar="DIR",
        help=f"The broker's data, log and state; by default {DEFAULT_FOLDER}.",
        envvar="LAMINAR_BROKER",
        default_factory=_default_folder,
        show_default=False,
    ),
]


@app.callback()
def broker() -> None:
    """Start, stop and inspect a local Kafka broker that keeps running between runs.

    \b
    Examples:
      laminar broker start --port 9092
      laminar run run.toml --set kafka.bootstrap_servers=localhost:9092
      laminar broker stop
    """


@app.command()
def start(
    folder: FolderOption,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free port, the same at every start.")] = 0,
    secure: Annotated[
        bool, typer.Option("--secure", help="Require TLS and authentication, with a user for each role.")
    ] = False,
    json: JsonOption = False,
) -> Report:
    """Start a single-node Apache Kafka broker on this machine's loopback address.

    Without --secure every user of this machine can read and write all topics: use it on a machine with one user.

    \b
    Examples:
      laminar broker start
      laminar broker start --port 9092
      laminar broker start --secure --folder guarded
    """
    from infra.deploy.role_acls import EXPORT, IMPORT, PEOPLE
    from infra.kafka.broker import BrokerConfig
    from infra.kafka.detached_broker import start_detached
    from pipelines.roles import ALL_PIPELINES

    users = (*ALL_PIPELINES, IMPORT, EXPORT, PEOPLE) if secure else ()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder} cannot be created ({error.strerror}): name another folder, or set LAMINAR_BROKER"
        raise typer.BadParameter(reason, param_hint="--folder") from error
    config = BrokerConfig(folder, port=port, secure=secure, users=users)
    status = start_detached(folder, config, lambda line: print_escaped(line, err=True))
    return _report(status, json)


@app.command()
def stop(folder: FolderOption, json: JsonOption = False) -> Report:
    """Stop the broker; its data stays.

    \b
    Examples:
      laminar broker stop
    """
    from infra.kafka.detached_broker import stop_detached

    stopped = stop_detached(folder)
    return Report({"stopped": stopped}, lambda: "stopped" if stopped else "no broker was running", as_json=json)


@app.command()
def status(folder: FolderOption, json: JsonOption = False) -> Report:
    """Show whether the broker runs, and its address. Exits with 1 if it does not run.

    \b
    Examples:
      laminar broker status --json
    """
    from infra.kafka.detached_broker import detached_status

    return _report(detached_status(folder), json)


def _report(status: Any, as_json: bool) -> Report:
    if status is None:
        return Report({"running": False}, lambda: "no broker is running", as_json=as_json, exit_code=1)
    data = {
        "running": True,
        "bootstrap_servers": status.bootstrap_servers,
        "pid": status.pid,
        "data": str(status.data_dir),
        "log": str(status.log_file),
        "client_properties": str(status.data_dir / "secure" / "{role}.properties") if status.secure else None,
    }
    secure = f"; kafka.client_properties = {data['client_properties']!r}" if status.secure else ""
    text = f"Apache Kafka at {status.bootstrap_servers} (pid {status.pid}, data in {status.data_dir}){secure}"
    return Report(data, lambda: text, as_json=as_json)
