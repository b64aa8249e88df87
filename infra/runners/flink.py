"""Beam's job server for Flink on this machine, with an embedded Flink or for a cluster, while a pipeline runs.

It consists of the newest compatible artifacts of Beam, each jar verified; Java is installed by pip. Beam's Java servers
listen on all interfaces, whatever host they are given, so their sockets are bound to loopback for them, unless the user
has allowed all interfaces. For a cluster of another Flink version use its own job server (`--job_endpoint`, or the file
of `--flink_job_server_jar`).
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from infra.kafka.broker import HOST, java_command
from infra.maven import Progress
from infra.runners.flink_jars import JARS
from infra.runners.local_server import ALLOW_VARIABLE, running_server
from infra.runners.loopback import loopback_command

_BUNDLES_ANOTHER_BEAM = "beam-sdks-java-harness-"
"""A jar for Java steps that bundles classes of another Beam version."""
_OPENED_PACKAGES = ("java.lang", "java.util", "java.nio", "sun.nio.ch")
_HEAP_MB = 1500
_START_S = 60.0


def running_flink(progress: Progress = lambda message: None, master: str = "[local]") -> AbstractContextManager[str]:
    """Run a job server for the Flink at `master`, or with an embedded one; the context value is its job endpoint.

    `progress` gets lines of text while jars are downloaded. Raises ExposedServer if it listens beyond loopback and the
    user has not allowed that, JarResolutionError, RuntimeError if it does not start.
    """
    jars = [jar for jar in JARS.class_path(progress) if not jar.name.startswith(_BUNDLES_ANOTHER_BEAM)]

    def command(port: int, folder: Path) -> list[str]:
        ports = (f"--job-port={port}", "--artifact-port=0", "--expansion-port=0")
        arguments = (f"--flink-master={'[local]' if master == '[auto]' else master}", f"--job-host={HOST}", *ports)
        java, *rest = java_command(_HEAP_MB, jars, "org.apache.beam.runners.flink.FlinkJobServerDriver", *arguments)
        add_opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED_PACKAGES]
        properties = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", f"-Djava.io.tmpdir={folder}"]
        whole = [java, *add_opens, *properties, *rest]
        return whole if os.environ.get(ALLOW_VARIABLE) else loopback_command(whole)

    return running_server("Flink", command, _START_S)


if __name__ == "__main__":
    with running_flink(lambda line: print(line, file=sys.stderr)) as endpoint:
        print(f"-- --job_endpoint={endpoint}", flush=True)
        sys.stdin.read()
