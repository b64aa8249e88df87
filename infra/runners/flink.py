"""Beam's job server for Flink on this machine, with a Flink within it or for a cluster, for as long as a pipeline runs.

It is put together from the newest of Beam's artifacts that fit one another, each jar checked; the Java comes with pip.
Beam's Java servers listen on all interfaces, whatever host they are given, so this asks for the user's consent. A
cluster of another Flink has a job server of its own (`--job_endpoint`, or the file of `--flink_job_server_jar`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from infra.kafka.broker import HOST, java_command
from infra.maven import Progress
from infra.runners.flink_jars import JARS
from infra.runners.local_server import reject_exposed_server, running_server

_CARRIES_OTHERS = "beam-sdks-java-harness-"
"""A jar, for steps in Java, that has classes of another Beam within it."""
_OPENED = ("java.lang", "java.util", "java.nio", "sun.nio.ch")
_HEAP_MB = 1500
_START_S = 60.0


def running_flink(progress: Progress = lambda message: None, master: str = "[local]") -> AbstractContextManager[str]:
    """A job server for the Flink at `master`, or with one within it, as long as the context lasts; its job endpoint.

    `progress` gets lines of text while jars are fetched. Raises ExposedServer where the user has not allowed it to
    listen on all interfaces, JarResolutionError, RuntimeError.
    """
    reject_exposed_server("Flink", ["0.0.0.0"])
    jars = [jar for jar in JARS.class_path(progress) if not jar.name.startswith(_CARRIES_OTHERS)]

    def command(port: int, folder: Path) -> list[str]:
        ports = (f"--job-port={port}", "--artifact-port=0", "--expansion-port=0")
        words = (f"--flink-master={'[local]' if master == '[auto]' else master}", f"--job-host={HOST}", *ports)
        java, *rest = java_command(_HEAP_MB, jars, "org.apache.beam.runners.flink.FlinkJobServerDriver", *words)
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
        quiet = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", f"-Djava.io.tmpdir={folder}"]
        return [java, *opened, *quiet, *rest]

    return running_server("Flink", command, _START_S)


if __name__ == "__main__":
    with running_flink(lambda line: print(line, file=sys.stderr)) as endpoint:
        print(f"-- --job_endpoint={endpoint}", flush=True)
        sys.stdin.read()
