"""Publishes manifests to the relay topic; a manifest is durable once all in-sync replicas have it.

Apart from the publisher, which knows no Kafka: the GPU check runs it where only torch is installed.
"""

from __future__ import annotations

from infra.kafka.producer import BoundedProducer
from schemas.codec import encode
from schemas.records import WeightVersion
from schemas.topics import RELAY

DEADLINE_S = 120.0
"""Seconds within which a manifest must be in the log."""


class ManifestLog:
    """Publishes the manifests of `run` through `producer`, which nothing else uses and which the caller closes.

    A call returns when the manifest is in the log. Raises DeliveryFailed, TimeoutError after `DEADLINE_S` seconds.
    """

    def __init__(self, producer: BoundedProducer, run: str) -> None:
        self._producer = producer
        self._topic = RELAY.name(run)

    def __call__(self, manifest: WeightVersion) -> None:
        value, headers = encode(manifest)
        self._producer.send(self._topic, value, key=str(manifest.version).encode(), headers=headers)
        self._producer.flush(DEADLINE_S)
