"""The trainer's side of the relay tier: the resources that publish versions, opened and closed together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from infra.clocks import wall_ms
from infra.kafka.producer import BoundedProducer
from infra.store.announce import ManifestLog, close_manifest_producer
from infra.store.chunks import DEFAULT_CHUNK_BYTES
from infra.store.publisher import Copy, Publisher, PublishFailed, Tensors, TensorWriter, copy_array
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.weight_pusher import WeightPusher
from schemas.records import PolicyVersion, RelayChain, TensorSpec, WeightVersion

log = logging.getLogger(__name__)

_DELIVERY_TIMEOUT_S = 5.0
"""How long a closing trainer waits for delivery of the last version to a master on another machine."""


@dataclass(frozen=True)
class PublishSettings:
    """How weights are sent to relays: the run's token, bytes per chunk, rate limit (10^6 bytes/s), deltas, TLS."""

    token: str = field(default="", repr=False)
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    max_megabytes_per_s: float | None = None
    deltas: bool = True
    tls: Tls | None = None

    def link(self) -> Link:
        rate = self.max_megabytes_per_s
        return Link(None if rate is None else rate * 1_000_000)


class Publishing:
    """Manifest log, weight pusher, and the `publisher` that uses them, on `host` (default: this machine).

    It closes `store` and the producer that `open_producer` returns. `copy` and `now` are those of `Publisher`.
    Raises as they do.
    """

    def __init__(
        self,
        store: WeightStore,
        open_producer: Callable[[], BoundedProducer],
        run: str,
        specs: Sequence[TensorSpec],
        parent: PolicyVersion | None,
        settings: PublishSettings,
        *,
        host: str | None = None,
        copy: Copy = copy_array,
        now: Callable[[], int] = wall_ms,
        system: System = SYSTEM,
    ) -> None:
        self._last: PolicyVersion | None = None
        with ExitStack() as resources:
            resources.enter_context(store)
            producer = open_producer()
            resources.callback(close_manifest_producer, producer)
            self._log = ManifestLog(producer, run)
            self._pusher = WeightPusher(store, run, settings.token, settings.link(), host, settings.tls, system)
            resources.callback(self._close_pusher)
            self.publisher = Publisher(
                store,
                self._announce,
                specs,
                parent,
                copy,
                now,
                chunk_bytes=settings.chunk_bytes,
                deltas=lambda: settings.deltas and self._pusher.relays > 1,
                system=system,
            )
            resources.callback(self._close_publisher)
            self._closing = resources.pop_all()

    def restore_version(self, weights: Tensors | TensorWriter, manifest: WeightVersion) -> None:
        """Restore `manifest`'s version, with its `weights`, to the store if it is missing, and deliver it: an earlier
        start may have ended before it could. Raises StoreError."""
        self.publisher.restore_version(weights, manifest)
        self._pusher.announce(manifest)

    def set_chain(self, chain: RelayChain) -> None:
        """Set the current relay chain."""
        self._pusher.set_chain(chain)

    def close(self) -> None:
        """Wait a bounded time for pending publishes and deliveries, then close everything."""
        self._closing.close()

    def _announce(self, manifest: WeightVersion) -> None:
        self._log(manifest)
        self._last = manifest.version
        self._pusher.announce(manifest)

    def _close_publisher(self) -> None:
        try:
            self.publisher.close(timeout_s=10)
        except (PublishFailed, TimeoutError) as error:
            log.error("the last version may not be published: %s", error)

    def _close_pusher(self) -> None:
        if self._last is not None and not self._pusher.wait_delivered(self._last, _DELIVERY_TIMEOUT_S):
            log.error("version %s was not delivered to the master at %s", self._last, self._pusher.master)
        self._pusher.close()
