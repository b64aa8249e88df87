"""Beam's job server for Flink on this machine, with an embedded Flink or for a cluster, while a pipeline runs.

It consists of the newest compatible artifacts of Beam, each jar verified; Java is installed by pip. Beam's Java servers
listen on all interfaces, whatever host they are given, so their sockets are bound to loopback for them, unless the user
has allowed all interfaces. A cluster must have the Flink version of the job server, which is checked first; for another
one use its own job server (`--job_endpoint`, or the file of `--flink_job_server_jar`).
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from infra.http_client import get
from infra.kafka.broker import HOST, java_command
from infra.maven import PrintProgress
from infra.runners.flink_jars import BEAM, FLINK, JARS
from infra.runners.local_server import ALLOW_VARIABLE, running_server
from infra.runners.loopback import loopback_command

log = logging.getLogger(__name__)

_BUNDLES_ANOTHER_BEAM = "beam-sdks-java-harness-"
"""A jar for Java steps that bundles classes of another Beam version."""
_OPENED_PACKAGES = ("java.lang", "java.util", "java.nio", "sun.nio.ch")
_HEAP_MB = 1500
_START_S = 60.0
_CHECK_S = 10.0
_MAX_REPLY = 65536
_EMBEDDED = ("[local]", "[auto]", "[collection]")


class UnsupportedFlink(RuntimeError):
    """The cluster does not respond, has another Flink version than the job server, or too few task slots."""


def running_flink(
    progress: PrintProgress = lambda message: None, master: str = "[local]", parallelism: int = 1
) -> AbstractContextManager[str]:
    """Run a job server for the Flink at `master`, or with an embedded one; the context value is its job endpoint.

    `progress` gets lines of text while jars are downloaded. A job needs as many task slots as its `parallelism`. Raises
    UnsupportedFlink, ExposedServer if it listens beyond
    loopback and the user has not allowed that, JarResolutionError, RuntimeError if it does not start.
    """
    if master not in _EMBEDDED:
        check_cluster(master)
        check_capacity(master, parallelism)
    jars = server_jars(progress)

    def command(port: int, folder: Path) -> list[str]:
        ports = (f"--job-port={port}", "--artifact-port=0", "--expansion-port=0")
        arguments = (f"--flink-master={'[local]' if master == '[auto]' else master}", f"--job-host={HOST}", *ports)
        java, *rest = java_command(_HEAP_MB, jars, "org.apache.beam.runners.flink.FlinkJobServerDriver", *arguments)
        whole = [java, *java_options(folder), *rest]
        return whole if os.environ.get(ALLOW_VARIABLE) else loopback_command(whole)

    return running_server("Flink", command, _START_S)


def server_jars(progress: PrintProgress = lambda message: None) -> list[Path]:
    """The class path of the job server, which also has the classes of a Flink cluster. Raises JarResolutionError."""
    return [jar for jar in JARS.class_path(progress) if not jar.name.startswith(_BUNDLES_ANOTHER_BEAM)]


def java_options(folder: Path) -> list[str]:
    """The options of Java for a process with Flink's and Beam's classes, whose temporary files are in `folder`."""
    add_opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED_PACKAGES]
    return [*add_opens, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", f"-Djava.io.tmpdir={folder}"]


def check_cluster(master: str) -> None:
    """Check that the Flink at `master`, `host:port` or a URL of its REST interface, has the version of the job server.

    Raises UnsupportedFlink with both versions, or with the reason why the cluster's could not be read.
    """
    version = _value(master, "/config", "flink-version")
    if re.match(rf"{re.escape(FLINK)}(\D|$)", str(version)):
        return
    raise UnsupportedFlink(
        f"the cluster at {master} has Flink {str(version)[:40]!r}; the job server here is of Beam {BEAM} for Flink "
        f"{FLINK}: use a cluster of Flink {FLINK}, or your own job server for that version "
        f"(-- --job_endpoint=HOST:PORT, or --flink_job_server_jar=FILE)"
    )


def check_capacity(master: str, parallelism: int) -> None:
    """Check that the Flink at `master` has as many task slots as `parallelism`. Slots in use count: an earlier job may
    be about to end. Raises UnsupportedFlink with both numbers; Flink would let the job wait for minutes, without a log.

    A cluster without slots is accepted with a warning: it may start task managers on demand (YARN, Kubernetes in the
    mode native).
    """
    slots = _value(master, "/overview", "slots-total")
    if slots == 0:
        log.warning(
            "the cluster at %s has no task slots yet: the job waits until task managers with %d have started",
            *(master, parallelism),
        )
    elif isinstance(slots, int) and slots < parallelism:
        raise UnsupportedFlink(
            f"the cluster at {master} has {slots} task slots, but the job needs {parallelism}: start more task "
            "managers, or lower --parallelism, score.shards and experience.shards"
        )


def _value(master: str, path: str, key: str) -> object:
    """The value of `key` that the REST interface at `master` gives at `path`. Raises UnsupportedFlink."""
    url = f"{master if '://' in master else f'http://{master}'}{path}"
    try:
        with get(url, _CHECK_S) as reply:
            return json.loads(reply.read(_MAX_REPLY))[key]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise UnsupportedFlink(
            f"no Flink responds at {url} ({error or type(error).__name__}): set --flink_master to the address of its "
            f"REST interface"
        ) from error


if __name__ == "__main__":
    with running_flink(lambda line: print(line, file=sys.stderr)) as endpoint:
        print(f"-- --job_endpoint={endpoint}", flush=True)
        sys.stdin.read()
