"""`python -m infra.jars`: writes the SHA-256 of the resolved jars, and the bootstrap checkpoint of the local broker.

Run it after a change of versions.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from infra.files import sha256_of
from infra.kafka.broker import BrokerConfig, format_by_kafka, server_properties
from infra.kafka.broker_jars import JARS as KAFKA
from infra.kafka.java_properties import properties_text
from infra.kafka.storage_format import BOOTSTRAP_CHECKPOINT, CHECKPOINT_FILE
from infra.runners.flink_jars import JARS as FLINK

for jars in (KAFKA, FLINK):
    lines = sorted(f"{sha256_of(jar)}  {jar.name}\n" for jar in jars.resolve(print))
    jars.digest_file.write_text("".join(lines), encoding="utf-8")
    print(f"{jars.digest_file}: {len(lines)} jars")

with tempfile.TemporaryDirectory() as folder:
    settings = server_properties(BrokerConfig(Path(folder)), 9092, 9093)
    properties = Path(folder) / "server.properties"
    properties.write_text(properties_text(settings))
    format_by_kafka(KAFKA.class_path(), properties, [])
    CHECKPOINT_FILE.write_bytes((Path(folder) / "log" / BOOTSTRAP_CHECKPOINT).read_bytes())
print(CHECKPOINT_FILE)
