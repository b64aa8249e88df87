"""Print the records of any topic of a run as JSON, without Laminar: BROKERS TOPIC [COLUMN ...].

For example kafka:9092 laminar.first.experiences trajectory.prompt.number trajectory.member reward. Of a run that has
stopped with its own broker, `laminar broker start --folder runs/first/kafka` starts it again and prints its address.
"""

import base64
import json
import socket
import sys

import pyarrow as pa
from kafka import KafkaConsumer, TopicPartition

if len(sys.argv) < 3:
    sys.exit(__doc__)
brokers, topic, *columns = sys.argv[1:]


def connection_error():
    """Why no broker can be connected to; None if one can. The client itself would try for half a minute."""
    reasons = []
    for address in brokers.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return None
        except (OSError, ValueError) as error:
            reasons.append(f"{address}: {error}")
    return "; ".join(reasons)


def records(topic):
    """All committed records of a topic up to its present end."""
    consumer = KafkaConsumer(bootstrap_servers=brokers, isolation_level="read_committed", auto_offset_reset="earliest")
    numbers = consumer.partitions_for_topic(topic)
    if not numbers:
        sys.exit(f"there is no topic {topic} at {brokers}; `laminar topics list` lists those of a run")
    partitions = [TopicPartition(topic, number) for number in numbers]
    consumer.assign(partitions)
    ends = consumer.end_offsets(partitions)
    while any(consumer.position(each) < ends[each] for each in partitions):
        for found in consumer.poll(timeout_ms=500).values():
            yield from found
    consumer.close()


if error := connection_error():
    sys.exit(
        f"no broker can be connected to: {error}. Of a run that has stopped with its own broker, "
        "`laminar broker start --folder runs/NAME/kafka` starts it again and prints its address"
    )
published = [json.loads(record.value) for record in records(topic.rpartition(".")[0] + ".schemas")]
schemas = {
    each["schema"]: pa.ipc.open_stream(base64.b64decode(each["arrow"])).schema for each in published if each["arrow"]
}
for record in records(topic):
    if record.value is None:  # a compacted topic: the key is deleted
        continue
    name = dict(record.headers)["laminar-schema"].decode()
    if name in schemas:
        rows = pa.ipc.read_record_batch(pa.py_buffer(record.value), schemas[name]).to_pylist()
    else:
        rows = [json.loads(record.value)]
    for row in rows:
        shown = {column: row.get(column) for column in columns} if columns else {"schema": name, **row}
        print(json.dumps(shown, default=lambda value: base64.b64encode(value).decode()))
