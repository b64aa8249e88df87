"""A TCP proxy that understands Kafka's framing, so that a fault can apply to one request of one producer.

    with KafkaProxy(("127.0.0.1", broker_port)) as proxy:     # clients use proxy.address
        late = proxy.add(LateRequest(Match([Api.END_TXN], "my-id"), before_request(3)))
        ...
        assert late.released.is_set()                                    # a fault without effect tests nothing
        print(proxy.describe())

The broker must advertise the proxy's address, or clients bypass the proxy after their first request:
`proxied_broker.py` starts a broker with a second listener for it. Faults are in `request_faults.py`. The proxy runs in
its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from faults.kafka_frames import Request, correlation_of, parse_request, read_frame

Address = tuple[str, int]
BUFFER = 1 << 26
"""The largest frame that is read ahead."""
PIECE = 1 << 16
"""Bytes are paced in pieces of this size."""
CATCH_UP_S = 1.0
"""A link catches up on so much: it has a queue, and a busy machine wakes the proxy late."""

T = TypeVar("T", bound="Fault")


class Fault(Protocol):
    """A fault of requests or responses. All methods run in the proxy's thread."""

    async def on_request(self, connection: Connection, request: Request) -> bool:
        """Apply the fault before `request` is forwarded; False to drop the request."""

    async def on_response(self, connection: Connection, request: Request, response: bytes) -> bool:
        """Apply the fault before `response` is returned; False to drop the response."""


class Pace:
    """A link of `bytes_per_s`, shared by all connections of one direction."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self.bytes = 0
        self._free_at = time.monotonic()

    async def take(self, size: int) -> None:
        """Return when `size` more bytes have passed the link."""
        self.bytes += size
        if self.bytes_per_s is None:
            return
        self._free_at = max(self._free_at, time.monotonic() - CATCH_UP_S) + size / self.bytes_per_s
        await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))


class Connection:
    """One client's connection and its connection to the broker."""

    def __init__(self, proxy: KafkaProxy, client: _Stream, broker: _Stream) -> None:
        self.proxy, self.client, self.broker = proxy, client, broker
        self._awaited: dict[int, Request] = {}
        self._detached = False

    async def run(self) -> None:
        """Forward in both directions until either side closes."""
        back = asyncio.create_task(self._responses())
        try:
            while not self._detached:
                request = parse_request(await read_frame(self.client.reader))
                self._awaited[request.correlation] = request
                self.proxy.requests[request.api] += 1
                if await self._passes(request):
                    await self.broker.send(request.frame, self.proxy.upstream_pace)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if self._detached:
                back.cancel()
            else:
                self.broker.abort()
                self.client.abort()
            with contextlib.suppress(asyncio.CancelledError):
                await back

    def detach(self) -> _Stream:
        """Reset the client and keep the broker's side, so that a request can be delivered later."""
        self._detached = True
        self.client.reset()
        return self.broker

    def reset(self) -> None:
        """Reset both sides."""
        self.client.reset()
        self.broker.abort()

    async def _passes(self, request: Request) -> bool:
        for fault in list(self.proxy.faults):
            if not await fault.on_request(self, request):
                return False
        return not self._detached

    async def _responses(self) -> None:
        try:
            while True:
                response = await read_frame(self.broker.reader)
                request = self._awaited.pop(correlation_of(response), None)
                passes = True
                for fault in list(self.proxy.faults) if request else []:
                    passes = passes and await fault.on_response(self, request, response)
                if passes:
                    await self.client.send(response, self.proxy.downstream_pace)
        except (asyncio.IncompleteReadError, OSError):
            if not self._detached:
                self.client.abort()


class _Stream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def send(self, data: bytes, pace: Pace) -> None:
        if pace.bytes_per_s is None:
            pace.bytes += len(data)
            self._writer.write(data)
            await self._writer.drain()
            return
        for first in range(0, len(data), PIECE):
            piece = data[first : first + PIECE]
            await pace.take(len(piece))
            self._writer.write(piece)
            await self._writer.drain()

    def reset(self) -> None:
        """Close with RST, as a host that has lost the connection does."""
        raw: socket.socket = self._writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def abort(self) -> None:
        self._writer.transport.abort()


class KafkaProxy:
    """Forwards connections at `port` (0: any free port) to the broker at `upstream`, through its faults."""

    def __init__(self, upstream: Address, port: int = 0, host: str = "127.0.0.1") -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.requests: Counter[int] = Counter()
        """Requests seen, by API key."""
        self.upstream_pace, self.downstream_pace = Pace(None), Pace(None)
        self.log: list[str] = []
        """Actions of faults, one line each, with seconds since the start."""
        self._began = time.monotonic()
        self._socket = socket.create_server((host, port))
        self.address: Address = self._socket.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: list[_Stream] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="kafka proxy", daemon=True)

    @property
    def port(self) -> int:
        return self.address[1]

    def add(self, fault: T) -> T:
        """Apply `fault` to every later request and response, after the faults added before."""
        self.faults.append(fault)
        return fault

    def throttle(self, bytes_per_s: float | None) -> None:
        """Give each direction a link of `bytes_per_s`, shared by all connections; None: no limit."""
        self.upstream_pace, self.downstream_pace = Pace(bytes_per_s), Pace(bytes_per_s)

    def clear(self) -> None:
        """Remove every fault and the throttle."""
        self.faults.clear()
        self.throttle(None)

    def note(self, line: str) -> None:
        """Append `line` to the log."""
        self.log.append(f"{time.monotonic() - self._began:8.3f} {line}")

    def describe(self) -> str:
        """The log as text."""
        return "\n".join(self.log)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` in the proxy's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def open_upstream(self) -> _Stream:
        """Another connection to the broker, closed with the proxy."""
        stream = _Stream(*await asyncio.open_connection(*self.upstream, limit=BUFFER))
        self._kept.append(stream)
        return stream

    def __enter__(self) -> KafkaProxy:
        self._thread.start()
        self._server = self.submit(asyncio.start_server(self._serve, sock=self._socket, limit=BUFFER))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.submit(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = _Stream(reader, writer)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await Connection(self, client, await self.open_upstream()).run()
        finally:
            client.abort()
            self._tasks.discard(task)

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._kept:
            stream.abort()
        await asyncio.sleep(0)  # transports close in the loop's next turn
