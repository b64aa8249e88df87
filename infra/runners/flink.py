"""Beam's job server for Flink on this machine, with an embedded Flink or for a cluster, while a pipeline runs.

It consists of the newest compatible artifacts of Beam, each jar verified; Java is installed by pip. Beam's Java servers
listen on all interfaces, whatever host they are given, so their sockets are bound to loopback for them, unless the user
has allowed all interfaces. A cluster must have the Flink version of the job server, which is checked first; for another
one use its own job server (`--job_endpoint`, or the file of `--flink_job_server_jar`). A job is cancelled by the
cluster's REST interface, see `infra.runners.flink_jobs`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import FlinkRunnerOptions

from infra.kafka.broker import HOST, java_command
from infra.maven import PrintProgress
from infra.runners.flink_jars import BEAM, FLINK, HEAP_MB, JARS
from infra.runners.flink_jobs import EMBEDDED, POLL_S, UnsupportedFlink, read_value, sole_job
from infra.runners.local_server import ALLOW_VARIABLE, running_server
from infra.runners.loopback import loopback_command
from infra.runners.options import ALLOW_UNTESTED
from infra.runners.stopping import STOPPING

log = logging.getLogger(__name__)

_BUNDLES_ANOTHER_BEAM = "beam-sdks-java-harness-"
"""A jar for Java steps that bundles classes of another Beam version."""
_JOB_SERVER_JAR = re.compile(r"beam-runners-flink-(?P<flink>\d+\.\d+)-job-server-(?P<beam>\d+\.\d+\.\d+)\S*\.jar$")
_OPENED_PACKAGES = ("java.lang", "java.util", "java.nio", "sun.nio.ch")
_SUBMISSIONS = 64
"""Jobs that one server can start at a time. Flink holds a thread of Java's common pool until a job has started, and
needs another to start it: with the default, one thread a processor, eight jobs waited for each other for ever.
"""
_START_S = 60.0
_SLOTS_S = 20.0
"""Seconds in which the slots of a job that has ended become free, and restarted task managers register theirs."""


@contextmanager
def running_flink(
    progress: PrintProgress = lambda message: None, master: str = "[local]", parallelism: int = 1, job: str = ""
) -> Iterator[str]:
    """Run a job server for the Flink at `master`, or with an embedded one; the context value is its job endpoint.

    `progress` gets lines of text while jars are downloaded. A job needs as many task slots as its `parallelism`. That
    with the name `job` is cancelled in the end, and those of earlier submissions before, see `sole_job`. Raises
    UnsupportedFlink, UncancelledJob, ExposedServer if it listens beyond loopback and the user has not allowed that,
    JarResolutionError, RuntimeError if it does not start.
    """
    with ExitStack() as stack:
        if master not in EMBEDDED:
            check_cluster(master)
            stack.enter_context(slots_for(master, parallelism, job))
        # The server ends first: what it has not submitted then, it never will.
        yield stack.enter_context(_running_server(master, progress))


@contextmanager
def slots_for(master: str, parallelism: int, job: str) -> Iterator[None]:
    """The task slots of the cluster at `master` for the job with the name `job`, without those of earlier submissions.

    Raises as `sole_job` and `check_capacity` do.
    """
    with sole_job(master, job):
        check_capacity(master, parallelism)
        yield


@contextmanager
def _running_server(master: str, progress: PrintProgress) -> Iterator[str]:
    jars = server_jars(progress)

    def command(port: int, folder: Path) -> list[str]:
        ports = (f"--job-port={port}", "--artifact-port=0", "--expansion-port=0")
        arguments = (f"--flink-master={'[local]' if master == '[auto]' else master}", f"--job-host={HOST}", *ports)
        java, *rest = java_command(HEAP_MB, jars, "org.apache.beam.runners.flink.FlinkJobServerDriver", *arguments)
        whole = [java, *java_options(folder), *rest]
        return whole if os.environ.get(ALLOW_VARIABLE) else loopback_command(whole)

    with running_server("Flink", command, _START_S) as endpoint:
        yield endpoint


def server_jars(progress: PrintProgress = lambda message: None) -> list[Path]:
    """The class path of the job server, which also has the classes of a Flink cluster. Raises JarResolutionError."""
    return [jar for jar in JARS.class_path(progress) if not jar.name.startswith(_BUNDLES_ANOTHER_BEAM)]


def java_options(folder: Path) -> list[str]:
    """The options of Java for a process with Flink's and Beam's classes, whose temporary files are in `folder`."""
    add_opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED_PACKAGES]
    properties = {
        "org.slf4j.simpleLogger.defaultLogLevel": "warn",
        "java.io.tmpdir": folder,
        "java.util.concurrent.ForkJoinPool.common.parallelism": _SUBMISSIONS,
    }
    return [*add_opens, *(f"-D{name}={value}" for name, value in properties.items())]


def check_cluster(master: str) -> None:
    """Check that the Flink at `master`, `host:port` or a URL of its REST interface, has the version of the job server.

    Raises UnsupportedFlink with both versions, or with the reason why the cluster's could not be read.
    """
    version = _version(master)
    if _is_release(version, FLINK):
        return
    raise UnsupportedFlink(
        f"the cluster at {master} has Flink {version!r}; the job server here is of Beam {BEAM} for Flink "
        f"{FLINK}: use a cluster of Flink {FLINK}, or your own job server for that version "
        f"(-- --job_endpoint=HOST:PORT, or --flink_job_server_jar=FILE, with {ALLOW_UNTESTED}=1)"
    )


def check_job_server(jar: str | None) -> None:
    """Check that a user's job server, the file `jar`, is of the tested pair of Beam and Flink, as its name says.

    Raises UnsupportedFlink with both versions, unless ALLOW_UNTESTED is set. A warning says that the versions are
    unknown: of a file with another name, and of a job server that was started elsewhere (no `jar`).
    """
    named = _JOB_SERVER_JAR.search(jar or "")
    if named is None:
        log.warning(
            "the job server is not Laminar's: its versions of Beam and Flink are unknown, and not compared with Beam "
            "%s here",
            beam.__version__,
        )
    elif (named["flink"], named["beam"]) != (FLINK, BEAM):
        _reject_untested(f"{named[0]} is of Beam {named['beam']} for Flink {named['flink']}")


def _reject_untested(server: str) -> None:
    reason = (
        f"{server}, the pipeline is of Beam {beam.__version__}: this pair was not tested, only a job server of Beam "
        f"{BEAM} for Flink {FLINK} was"
    )
    if not os.environ.get(ALLOW_UNTESTED):
        raise UnsupportedFlink(f"{reason}. Use that one on a cluster of Flink {FLINK}, or set {ALLOW_UNTESTED}=1")
    log.warning("%s", reason)


def check_own_server(master: str, jar: str | None) -> None:
    """Check that the Flink at `master` has the version that the name of a job server's file, `jar`, says.

    One whose version is unknown must be on a cluster of the tested Flink. Raises UnsupportedFlink with both versions;
    if ALLOW_UNTESTED is set, an untested Flink is a warning, which says if Beam has no job server for it.
    """
    version = _version(master)
    named = _JOB_SERVER_JAR.search(jar or "")
    if named and not _is_release(version, named["flink"]):
        raise UnsupportedFlink(
            f"the cluster at {master} has Flink {version!r}; {named[0]} is of Beam {named['beam']} for Flink "
            f"{named['flink']}: use a cluster of Flink {named['flink']}, or the job server for the cluster's version"
        )
    if named or _is_release(version, FLINK):
        return
    _reject_untested(f"the cluster at {master} has Flink {version!r}")
    published = FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS
    if not any(_is_release(version, each) for each in published):
        log.warning(
            "the cluster at %s has Flink %r; Beam %s has job servers for Flink %s",
            *(master, version, beam.__version__, ", ".join(published)),
        )


def _version(master: str) -> str:
    return str(read_value(master, "/config", "flink-version"))[:40]


def _is_release(version: str, release: str) -> bool:
    """Whether `version` is one of `release`: 1.19.3 and 1.19-SNAPSHOT are of 1.19."""
    return re.match(rf"{re.escape(release)}(\D|$)", version) is not None


def check_capacity(master: str, parallelism: int) -> None:
    """Check that the Flink at `master` has as many free task slots as `parallelism`, or will have them in a moment.

    Beam's default parallelism is -1, with which a job needs one slot. Raises UnsupportedFlink with the numbers; Flink
    would let the job wait for minutes, without a log. A cluster without slots is accepted with a warning: it may start
    task managers on demand (YARN, Kubernetes in the mode native).
    """
    parallelism = max(1, parallelism)
    deadline = time.monotonic() + _SLOTS_S
    while True:
        slots, free = (read_value(master, "/overview", f"slots-{kind}") for kind in ("total", "available"))
        if slots == 0:
            log.warning(
                "the cluster at %s has no task slots yet: the job waits until task managers with %d have started",
                *(master, parallelism),
            )
        if slots == 0 or free >= parallelism:
            return
        if slots < parallelism or time.monotonic() > deadline:
            raise UnsupportedFlink(
                f"the cluster at {master} has {slots} task slots, {free} of them free, but the job needs "
                f"{parallelism}: start more task managers, cancel other jobs, or lower --parallelism, score.shards and "
                "experience.shards"
            )
        if STOPPING.wait(POLL_S):
            return


def workers_for_slots(master: str, given: int | None) -> list[str]:
    """The option with which each task manager of the Flink at `master` has a worker for each of its slots.

    A worker is a process; Beam's default is one for all slots of a task manager. None is added if there are no task
    managers yet, or the user has `given` a number; a warning has the numbers if shards may share a worker. Raises
    UnsupportedFlink if no Flink responds.
    """
    managers = read_value(master, "/taskmanagers", "taskmanagers")
    slots = max((each.get("slotsNumber", 0) for each in managers), default=0)
    if slots > 1:
        log.warning(
            "task managers of the cluster at %s have up to %d slots, and %d workers each, to which Flink deals steps "
            "in turns: shards of a role may share one. Give each task manager one slot%s",
            *(master, slots, slots if given is None else given),
            "" if given is None or given >= slots else f", or set --sdk_worker_parallelism={slots}",
        )
    return [f"--sdk_worker_parallelism={slots}"] if slots > 1 and given is None else []


if __name__ == "__main__":
    with running_flink(lambda line: print(line, file=sys.stderr)) as endpoint:
        print(f"-- --job_endpoint={endpoint}", flush=True)
        sys.stdin.read()
