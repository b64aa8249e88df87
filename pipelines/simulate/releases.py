"""An earlier release of the product in a simulated run: it writes earlier versions of records that are still read."""

from __future__ import annotations

from infra.kafka.topic_reader import schema_of
from infra.simulation.streams import Streams
from schemas.codec import Headers, as_version, versions_of


class EarlierRelease:
    """Writes each class of records at an earlier version, which `streams` draws once, where its fields fit that."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._versions: dict[str, int] = {}

    def __call__(self, value: bytes, headers: Headers) -> tuple[bytes, Headers]:
        """Value and headers as this release writes them."""
        schema = schema_of(headers)
        version = self._versions.get(schema)
        if version is None:
            versions = versions_of(schema)
            earlier = versions[:-1] or versions
            version = self._streams.of("earlier release", schema).choice(earlier) if earlier else 0
            self._versions[schema] = version
        return as_version(value, headers, version)
