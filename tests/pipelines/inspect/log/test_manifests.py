"""Manifests by version: they are decoded on access, so an invalid one raises only then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from record_samples import SAMPLES

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from pipelines.inspect.log.manifests import Manifests
from schemas.codec import encode
from schemas.records import PolicyVersion, RelayChain, WeightVersion
from schemas.release import OldRelease
from schemas.topics import RELAY


def test_manifests_are_decoded_on_access(broker: Broker, run_id: str) -> None:
    client, name = ClientProperties.at(broker.bootstrap_servers), RELAY.name(run_id)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1)])
    versions = [PolicyVersion(1, 10), PolicyVersion(1, 9), PolicyVersion(2, 9)]
    with BoundedProducer(client) as producer:
        producer.send(name, b"{}", key=b"1.1", headers=(("laminar-schema", b"WeightVersion/2"),))
        producer.flush(30)
        with pytest.raises(OldRelease, match=r"a WeightVersion/2 record was written by release 0\.1\.0"):
            Manifests(client, run_id)
        for version in versions:
            value, headers = encode(replace(SAMPLES[WeightVersion], version=version))
            producer.send(name, value, key=str(version).encode(), headers=headers)
        producer.send(name, b"{", key=b"1.11", headers=headers)
        producer.send(name, value, key=b"the newest", headers=headers)
        producer.send(name, *encode(SAMPLES[RelayChain])[:1], key=b"3.3", headers=encode(SAMPLES[RelayChain])[1])
    found = Manifests(client, run_id)
    assert list(map(str, found)) == ["1.9", "1.10", "1.11", "2.9"]
    assert found[PolicyVersion(2, 9)].version == PolicyVersion(2, 9)
    assert [str(manifest.version) for manifest in found.readable()] == ["1.9", "1.10", "2.9"]
    with pytest.raises(RuntimeError, match=r"the manifest of 1\.11 at offset 4 cannot be decoded: .*not JSON"):
        found[PolicyVersion(1, 11)]
    assert PolicyVersion(3, 3) not in found
