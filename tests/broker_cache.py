"""Writes Java's ahead-of-time cache of a starting broker's classes: `python tests/broker_cache.py FILE`.

With it (`JAVA_TOOL_OPTIONS=-XX:AOTCache=FILE`) a start takes half the CPU time. Only the tests, which start dozens of
brokers, use it: it has code of the jars, so a run that used it would not verify what it executes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from infra.kafka import broker
from infra.kafka.broker import BrokerConfig, start_broker


def main(file: Path) -> None:
    """Start a broker and stop it: Java writes the cache when it exits."""
    partial = file.with_name(f"{file.name}.partial")
    broker.JVM_FLAGS = (*broker.JVM_FLAGS, f"-XX:AOTCacheOutput={partial}")
    with tempfile.TemporaryDirectory() as folder:
        running = start_broker(BrokerConfig(Path(folder), start_timeout_s=300.0))
        running.stop(timeout=300.0)
    partial.replace(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
