"""Decode the Arrow records of a topic without Laminar: BROKERS TOPIC, such as kafka:9092 laminar.first.experiences."""

import base64
import json
import sys

import pyarrow as pa
from kafka import KafkaConsumer, TopicPartition

brokers, topic = sys.argv[1:]


def records(topic):
    """All committed records of a topic up to its present end."""
    consumer = KafkaConsumer(bootstrap_servers=brokers, isolation_level="read_committed", auto_offset_reset="earliest")
    partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
    consumer.assign(partitions)
    ends = consumer.end_offsets(partitions)
    while any(consumer.position(each) < ends[each] for each in partitions):
        for found in consumer.poll(timeout_ms=500).values():
            yield from found
    consumer.close()


published = [json.loads(record.value) for record in records(topic.rpartition(".")[0] + ".schemas")]
schemas = {
    each["schema"]: pa.ipc.open_stream(base64.b64decode(each["arrow"])).schema for each in published if each["arrow"]
}
for record in records(topic):
    schema = schemas.get(dict(record.headers)["laminar-schema"].decode())
    if schema is not None:  # None: the value is JSON
        batch = pa.ipc.read_record_batch(pa.py_buffer(record.value), schema)
        for row in batch.select(["trajectory.prompt.number", "trajectory.member", "reward"]).to_pylist():
            print(json.dumps(row))
