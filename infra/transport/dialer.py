"""Opens connections to the relays of a chain, and remembers the addresses that do not work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from infra.system import SYSTEM, System
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.endpoint import Endpoint
from infra.transport.frames import PeerUnreachable
from infra.transport.peer import Peer, dial
from infra.transport.throttle import Link
from schemas.records import RelayLink

log = logging.getLogger(__name__)

UNREACHABLE_S = 30.0
"""Seconds for which a failed address is reported since the last try."""


class FailedAddresses:
    """The addresses to which the last try failed, in the last `UNREACHABLE_S` seconds of `clock`. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, address: str) -> bool:
        """Record a failure; return whether the address is new."""
        with self._lock:
            self._forget()
            is_new = address not in self._failed
            self._failed[address] = self._clock() + UNREACHABLE_S
            return is_new

    def remove(self, address: str) -> None:
        """Record that `address` works."""
        with self._lock:
            self._failed.pop(address, None)

    def addresses(self) -> tuple[str, ...]:
        """All of them, sorted."""
        with self._lock:
            self._forget()
            return tuple(sorted(self._failed))

    def _forget(self) -> None:
        now = self._clock()
        self._failed = {address: until for address, until in self._failed.items() if until > now}


class Dialer:
    """Connects relay `relay` of `run`, at `endpoint`, to other relays; receives through `link`. Thread-safe."""

    def __init__(
        self,
        run: str,
        relay: int,
        endpoint: Endpoint,
        link: Link,
        clock: Callable[[], float] | None = None,
        system: System = SYSTEM,
    ) -> None:
        self._run, self._relay, self._endpoint, self._link = run, relay, endpoint, link
        self._system = system
        self._failed = FailedAddresses(clock or system.monotonic)

    def dial(self, to: RelayLink, blob: ChunkedBlob, memory: memoryview, may_wait: bool) -> Peer:
        """Open a connection that fills `memory` with chunks of `blob`. Raises TransportError."""
        token, tls = self._endpoint.token, self._endpoint.tls
        try:
            peer = dial(
                to.address, self._run, token, self._relay, blob, memory, self._link, may_wait, tls, self._system
            )
        except PeerUnreachable as error:
            if self._failed.add(to.address):
                log.warning(
                    "relay %d of machine %s cannot be reached from here: %s; if it is up, set relay.advertise there to "
                    "an address that other machines reach",
                    to.relay,
                    to.host,
                    error,
                )
            raise
        self._failed.remove(to.address)
        return peer

    def unreachable(self) -> tuple[str, ...]:
        """The addresses to which the last try failed, in the last `UNREACHABLE_S` seconds."""
        return self._failed.addresses()
