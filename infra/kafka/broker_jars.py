"""The jars of the local broker."""

from __future__ import annotations

from infra.maven import Jars

KAFKA_VERSION = "4.3.1"
JARS = Jars(
    f"kafka-{KAFKA_VERSION}",
    f"Apache Kafka {KAFKA_VERSION} (about 43 MB of jars, once per user)",
    (
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
        # Listed explicitly: otherwise the resolver takes an older one from a transitive dependency.
        f"org.apache.kafka:kafka-clients:{KAFKA_VERSION}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.2",
    ),
    "use a running broker: --kafka_bootstrap_servers",
)
