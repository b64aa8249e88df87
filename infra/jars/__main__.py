"""`python -m infra.jars`: writes the SHA-256 of the resolved jars; run it after a change of versions."""

from __future__ import annotations

from infra.kafka.broker_jars import JARS as KAFKA
from infra.maven import sha256_of
from infra.runners.flink_jars import JARS as FLINK

for jars in (KAFKA, FLINK):
    lines = sorted(f"{sha256_of(jar)}  {jar.name}\n" for jar in jars.resolve(print))
    jars.digest_file.write_text("".join(lines), encoding="utf-8")
    print(f"{jars.digest_file}: {len(lines)} jars")
