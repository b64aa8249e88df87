"""Publishes manifests to the relay topic; a manifest is durable once all in-sync replicas have it.

Apart from the publisher, which knows no Kafka: the GPU check runs it where only torch is installed.
"""

from __future__ import annotations

from infra.kafka.producer import BoundedProducer
from schemas.codec import encode
from schemas.records import WeightVersion
from schemas.topics import RELAY


class ManifestLog:
    """Publishes the manifests of `run` through `producer`, which nothing else uses and which the caller closes.

    A call returns when the manifest is in the log. Raises DeliveryFailed, TimeoutError after `deadline_s` seconds.
    """

    def __init__(self, producer: BoundedProducer, run: str, deadline_s: float = 120.0) -> None:
        self._producer = producer
        self._topic = RELAY.name(run)
        self._deadline_s = deadline_s

    def __call__(self, manifest: WeightVersion) -> None:
        value, headers = encode(manifest)
        self._producer.send(self._topic, value, key=str(manifest.version).encode(), headers=headers)
        self._producer.flush(self._deadline_s)
