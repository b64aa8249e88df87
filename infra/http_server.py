"""An HTTP server, uvicorn, behind limits for connections that have not shown a valid key, and for idle ones.

Clients without a key cannot lock others out: their connections are few, and each has a deadline for its TLS handshake
and for the header of a request. A server without keys has these limits for all of its connections. Nor can one with a
key: of its connections without a request in progress only the newest stay.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_UNAUTHENTICATED = 128
"""Connections without a valid key so far: a new one replaces the oldest of the address that has most."""
MAX_IDLE = 128
"""Connections of one holder of a key without a request in progress: a new one replaces the oldest."""
READ_S = 60
"""Seconds in which a client must take what was sent to it; otherwise the kernel ends the connection (Linux)."""
HEADER_S = 10.0
"""Seconds for a TLS handshake, and for the header of a request from its first byte on."""
_NO_FILES_S = 0.1

SocketAddress = tuple[str, int]


@dataclass
class _KeyedConnection:
    """A connection with `requests` in progress; the key of the last one is that of `holder`."""

    connection: socket.socket
    holder: str
    requests: int = 0


@dataclass
class Connections:
    """The connections on which no request had a valid key, oldest first, at most `most`, and those with a key."""

    most: int = MAX_UNAUTHENTICATED

    def __post_init__(self) -> None:
        self._connections: dict[SocketAddress, socket.socket] = {}
        self._keyed: dict[SocketAddress, _KeyedConnection] = {}
        """Idle ones in the order of their last responses."""

    def __len__(self) -> int:
        """The number of those without a key."""
        return len(self._connections)

    def add(self, address: SocketAddress, connection: socket.socket) -> None:
        """Record a new connection; if there are too many, another one ends."""
        if len(self._connections) >= self.most:
            self.drop_oldest()
        self._connections[address] = connection

    def drop_oldest(self) -> None:
        """End the oldest connection of the address that has most."""
        if self._connections:
            busiest, _ = Counter(host for host, _ in self._connections).most_common(1)[0]
            oldest = next(address for address in self._connections if address[0] == busiest)
            with suppress(OSError):
                self._connections.pop(oldest).shutdown(socket.SHUT_RDWR)

    def remove(self, address: SocketAddress) -> None:
        """The connection has ended."""
        self._connections.pop(address, None)
        self._keyed.pop(address, None)

    @contextmanager
    def in_progress(self, address: SocketAddress | None, holder: str) -> Iterator[None]:
        """A request with the valid key of `holder`, such as an episode, is answered.

        Its connection is idle afterwards, unless the next request on it has begun.
        """
        if address is not None and (connection := self._connections.pop(address, None)) is not None:
            self._keyed[address] = _KeyedConnection(connection, holder)
        keyed = None if address is None else self._keyed.get(address)
        if address is None or keyed is None:  # it has ended
            yield
            return
        keyed.holder, keyed.requests = holder, keyed.requests + 1
        try:
            yield
        finally:
            keyed.requests -= 1
            if not keyed.requests and self._keyed.get(address) is keyed:
                self._keyed[address] = self._keyed.pop(address)  # the newest
                self._drop_idle(keyed.holder)

    def _drop_idle(self, holder: str) -> None:
        """End the oldest idle connection of `holder` if it has too many."""
        of_holder = (item for item in self._keyed.items() if item[1].holder == holder)
        idle = [(address, keyed.connection) for address, keyed in of_holder if not keyed.requests]
        if len(idle) > MAX_IDLE:
            address, connection = idle[0]
            self.remove(address)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def raise_file_limit() -> None:
    """Let this process have as many open files, and so connections, as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class HttpServer(uvicorn.Server):
    """Serves the ASGI `application` on listening sockets, with `tls` over TLS.

    The application reports requests with a valid key to `connections`.
    """

    def __init__(
        self,
        application: object,
        connections: Connections,
        tls: ssl.SSLContext | None = None,
        header_s: float = HEADER_S,
    ) -> None:
        self._connections, self._tls, self._header_s = connections, tls, header_s
        self._opening: set[asyncio.Task[None]] = set()
        options = uvicorn.Config(
            application,  # type: ignore[arg-type]
            http=H11Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        super().__init__(options)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self.servers = []
        for listening in sockets:
            listening.setblocking(False)
        self._accepting = [asyncio.create_task(self._accept(listening)) for listening in sockets]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in [*self._accepting, *self._opening]:
            task.cancel()
        await asyncio.gather(*self._accepting, *self._opening, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError:  # no more files, or a connection that has ended already
                self._connections.drop_oldest()
                await asyncio.sleep(_NO_FILES_S)
                continue
            connection.setblocking(False)
            # A response is two writes: Nagle's algorithm would keep the second until the client acknowledges the first,
            # after up to 40 ms. asyncio turns it off for sockets that were made with a protocol number alone.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, READ_S * 1000)
            self._connections.add(address[:2], connection)
            task = asyncio.create_task(self._open(connection, address[:2]))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            await asyncio.sleep(0)  # with many waiting connections, the first ones are to show their keys meanwhile

    async def _open(self, connection: socket.socket, address: SocketAddress) -> None:
        """Complete the TLS handshake, if there is one; the protocol then has the connection."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self.config, self.server_state, self._connections, address, self._header_s),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._header_s if self._tls is not None else None,
            )
        except (OSError, asyncio.CancelledError):
            self._connections.remove(address)
            connection.close()


class _Connection(H11Protocol):
    """An HTTP connection on which a request's header must be complete in time."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        connections: Connections,
        address: SocketAddress,
        header_s: float,
    ) -> None:
        super().__init__(config, state, {})
        self._connections, self._address, self._header_s = connections, address, header_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self._address)
        if self._deadline is not None:
            self._deadline.cancel()

    def _set_deadline(self) -> None:
        """Start the deadline if a header is incomplete; end it if a request is being answered."""
        idle = self.timeout_keep_alive_task is not None
        if idle or (self.cycle is not None and not self.cycle.response_complete):
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._header_s, self.transport.close)
