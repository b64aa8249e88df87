"""The trainer's side of the relay tier: what it takes to let versions go out, opened and closed as one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from infra.kafka.producer import BoundedProducer, DeliveryFailed
from infra.kafka.properties import ClientProperties
from infra.store.announce import ManifestLog
from infra.store.chunks import DEFAULT_CHUNK_BYTES
from infra.store.publisher import Publisher, PublishFailed
from infra.store.weight_store import WeightStore
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.weight_pusher import WeightPusher
from operators.trainer.tensor_bytes import copy_tensor
from schemas.records import PolicyVersion, RelayChain, TensorSpec, WeightVersion

log = logging.getLogger(__name__)

_DELIVER_S = 5.0
"""How long the end of a trainer waits for a master elsewhere to have the last version."""


@dataclass(frozen=True)
class PublishSettings:
    """How weights go to relays: the run's token, bytes a chunk, a limit (10^6 bytes/s), deltas or not, TLS."""

    token: str = ""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    max_megabytes_per_s: float | None = None
    deltas: bool = True
    tls: Tls | None = None

    def link(self) -> Link:
        rate = self.max_megabytes_per_s
        return Link(None if rate is None else rate * 1_000_000)


class Publishing:
    """Store, manifest log, courier and the `publisher` over them. Raises as they do."""

    def __init__(
        self,
        store: Path,
        keep: int,
        client: ClientProperties,
        run: str,
        specs: Sequence[TensorSpec],
        parent: PolicyVersion | None,
        settings: PublishSettings,
    ) -> None:
        self._last: PolicyVersion | None = None
        with ExitStack() as opening:
            opened = opening.enter_context(WeightStore(store, keep))
            producer = BoundedProducer(client)
            opening.callback(_close_producer, producer)
            self._log = ManifestLog(producer, run)
            self._pusher = WeightPusher(opened, run, settings.token, settings.link(), tls=settings.tls)
            opening.callback(self._close_pusher)
            self.publisher = Publisher(
                opened,
                self._announce,
                specs,
                parent,
                copy_tensor,
                chunk_bytes=settings.chunk_bytes,
                deltas=lambda: settings.deltas and self._pusher.relays > 1,
            )
            opening.callback(self._close_publisher)
            self._closing = opening.pop_all()

    def restore_version(self, weights: Mapping[str, Tensor], manifest: WeightVersion) -> None:
        """Bring `manifest`'s version, whose `weights` these are, back where it was lost. Raises StoreError."""
        if self.publisher.restore_version(weights, manifest):
            self._pusher.announce(manifest)

    def obey(self, chain: RelayChain) -> None:
        """The relays stand like this."""
        self._pusher.set_chain(chain)

    def close(self) -> None:
        """Let out what is on its way, as far as that does not take long, and close everything."""
        self._closing.close()

    def _announce(self, manifest: WeightVersion) -> None:
        self._log(manifest)
        self._last = manifest.version
        self._pusher.announce(manifest)

    def _close_publisher(self) -> None:
        try:
            self.publisher.close(timeout_s=10)
        except (PublishFailed, TimeoutError) as error:
            log.error("the last version may not be out: %s", error)

    def _close_pusher(self) -> None:
        if self._last is not None and not self._pusher.wait_delivered(self._last, _DELIVER_S):
            log.error("the master at %s does not have version %s", self._pusher.master, self._last)
        self._pusher.close()


def _close_producer(producer: BoundedProducer) -> None:
    try:
        producer.close(timeout_s=2)
    except (DeliveryFailed, TimeoutError) as error:
        log.error("a manifest may not be in the log: %s", error)
