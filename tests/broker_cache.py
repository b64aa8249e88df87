"""Writes Java's ahead-of-time cache of the classes of a broker with a run: `python tests/broker_cache.py FILE`.

With it (`JAVA_TOOL_OPTIONS=-XX:AOTCache=FILE`) a start takes half the CPU time, and the first run takes a second less.
Only the tests, which start dozens of brokers, use it: it has code of the jars, so a run that used it would not verify
what it executes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import tomli_w

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).with_name("end_to_end")))

from small_runs import EMULATED

from infra.kafka import broker
from infra.kafka.broker import BrokerConfig, start_broker


def main(file: Path) -> None:
    """Start a broker, let a run use it, and stop it: Java writes the cache when it exits."""
    partial = file.with_name(f"{file.name}.partial")
    broker.JVM_FLAGS = (*broker.JVM_FLAGS, f"-XX:AOTCacheOutput={partial}")
    with tempfile.TemporaryDirectory() as folder:
        running = start_broker(BrokerConfig(Path(folder), start_timeout_s=300.0))
        config = Path(folder) / "run.toml"
        config.write_text(tomli_w.dumps({**EMULATED, "kafka": {"bootstrap_servers": running.bootstrap_servers}}))
        command = [str(Path(sys.executable).with_name("laminar")), "run", str(config)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        running.stop(timeout=300.0)
    partial.replace(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
