"""Chunks of a topic: small ones first, all records in order."""

from __future__ import annotations

from dataclasses import replace

from record_samples import SAMPLES

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from pipelines.inspect.log.chunks import CHUNK, FIRST_CHUNKS, read_chunks
from schemas.codec import encode
from schemas.records import Settled
from schemas.topics import SETTLED

RECORDS = 5_000


def test_read_chunks_begins_with_small_chunks(broker: Broker, run_id: str) -> None:
    client, name = ClientProperties.at(broker.bootstrap_servers), SETTLED.name(run_id)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1)])
    with BoundedProducer(client) as producer:
        for number in range(RECORDS):
            value, headers = encode(replace(SAMPLES[Settled], tokens=number))
            producer.send(name, value, headers=headers, partition=0)
    chunks = list(read_chunks(client, SETTLED, name, partition_ranges(client, name)))
    lengths = [len(chunk.records) for chunk in chunks]
    assert lengths[0] <= FIRST_CHUNKS[0]
    assert FIRST_CHUNKS[-1] < max(lengths) <= CHUNK
    assert [row["tokens"] for chunk in chunks for (row,) in chunk.plain()] == list(range(RECORDS))
