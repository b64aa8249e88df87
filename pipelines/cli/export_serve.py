"""`laminar export serve`: serve a run's topics over Arrow Flight."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from infra.escaping import print_escaped
from infra.listening import is_loopback
from pipelines.cli.options import Address


def serve_command(
    address: Address,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free port.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Require the token in FILE; needed beyond this machine."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="The TLS certificate (PEM); needs --key.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="The certificate's key (PEM).")] = None,
) -> None:
    """Serve a run's topics over Arrow Flight until Ctrl-C. Clients can read while records are written, and not write.

    A ticket is JSON: {"topic": "experiences", "where": "reward > 0.5", "from": "-100", "follow": true}.

    \b
    Examples:
      laminar export serve --port 8815
      laminar export serve --host 0.0.0.0 --port 8815 --token-file token --certificate me.pem --key me.key
      python -c "import pyarrow.flight as f; c = f.connect('grpc://127.0.0.1:8815'); print(*c.list_flights())"
    """
    if not is_loopback(host) and (token_file is None or certificate is None):
        needed = "--token-file, --certificate and --key (without TLS anybody on the network can read the token)"
        raise typer.BadParameter(f"other machines can reach {host}: give {needed}", param_hint="--host")
    if (certificate is None) != (key is None):
        raise typer.BadParameter("give both options or neither", param_hint="--certificate, --key")
    from operators.export.flight import TopicServer, read_token

    token = "" if token_file is None else read_token(token_file)
    pair = None if certificate is None or key is None else (certificate.read_bytes(), key.read_bytes())
    connection = address.connect()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.set())
    with TopicServer(connection.client, connection.run, host, port, token, pair) as server:
        print_escaped(f"serving run {connection.run} at {server.location}")
        stopped.wait()
