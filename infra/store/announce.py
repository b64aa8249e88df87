"""Publishes manifests to the relay topic; a manifest is durable once all in-sync replicas have it.

Apart from the publisher, which knows no Kafka: the GPU check runs it where only torch is installed.
"""

from __future__ import annotations

import logging

from infra.kafka.producer import BoundedProducer, DeliveryFailed
from schemas.codec import encode
from schemas.records import WeightVersion
from schemas.topics import RELAY

log = logging.getLogger(__name__)

DEADLINE_S = 120.0
"""Seconds within which a manifest must be in the log."""


def close_manifest_producer(producer: BoundedProducer) -> None:
    """Close the producer of a ManifestLog; a manifest that is not acknowledged is logged as an error."""
    try:
        producer.close(timeout_s=2)
    except (DeliveryFailed, TimeoutError) as error:
        log.error("the last manifest may not be in the log: %s", error)


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
