"""The jars of Beam's job server for Flink, and its heap."""

from __future__ import annotations

from infra.maven import Jars

FLINK, BEAM = "1.19", "2.70.0"
HEAP_MB = 1500
JARS = Jars(
    f"flink-{FLINK}-beam-{BEAM}",
    f"Apache Flink {FLINK} and Apache Beam {BEAM} (about 160 MB of jars, once per user)",
    (
        f"org.apache.beam:beam-runners-flink-{FLINK}:{BEAM}",
        "org.apache.beam:beam-runners-java-job-service:2.65.0",
        "org.slf4j:slf4j-simple:2.0.16",
    ),
    "use another job server: -- --job_endpoint=HOST:PORT, or --flink_job_server_jar=FILE",
)
