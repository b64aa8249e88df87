"""Serves metrics to Prometheus over HTTP, with limits for connections, headers and slow clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import make_asgi_app
from prometheus_client.registry import Collector

from infra.http_server import HEADER_S, HttpServer, UnauthenticatedConnections

MAX_CONNECTIONS = 64
"""A new connection above it replaces the oldest of the address that has most: a flood does not stop the scrapes."""
_END_S = 10.0


@contextmanager
def serving_metrics(
    metrics: Collector, host: str, port: int, most: int = MAX_CONNECTIONS, header_s: float = HEADER_S
) -> Iterator[int]:
    """Serve `metrics` at `host`:`port` (0: a free port) from a thread during the context; its value is the port.

    At most `most` connections may be open, and a request's header must arrive within `header_s` seconds. Raises OSError
    if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        server = HttpServer(_metrics_application(metrics), UnauthenticatedConnections(most), header_s=header_s)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="metrics", daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(_END_S)


def _metrics_application(metrics: Collector) -> Any:
    """An ASGI application that answers each request with `metrics`, and reads no body."""
    application = make_asgi_app(metrics)

    async def no_body() -> dict[str, str]:
        return {"type": "http.request"}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await application(scope, no_body, send)

    return answer
