"""Decode a topic of Arrow records without Laminar: BROKERS TOPIC SCHEMA-FILE."""

import json
import sys

import pyarrow as pa
from kafka import KafkaConsumer

brokers, topic, schema_file = sys.argv[1:]
schema = pa.ipc.open_stream(schema_file).schema  # laminar topics schema NOUN -O arrow > schema-file
for record in KafkaConsumer(
    topic,
    bootstrap_servers=brokers,
    auto_offset_reset="earliest",
    isolation_level="read_committed",
    consumer_timeout_ms=5000,
):
    if dict(record.headers)["content-type"] == b"application/vnd.apache.arrow.recordbatch":
        batch = pa.ipc.read_record_batch(pa.py_buffer(record.value), schema)
        for row in batch.select(["trajectory.prompt.number", "trajectory.member", "reward"]).to_pylist():
            print(json.dumps(row))
