"""The jobs of a Flink cluster by its REST interface: Beam's job server submits one, but cannot cancel it.

A request to cancel only ends the wait of the job server (`JobInvocation.cancel` interrupts its thread). The job would
run on, hold its task slots and commit beside a successor, also after its job server was killed. So a job has a name
that its next submission has, too, and each of them cancels what has that name.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from infra.http_client import open_url

log = logging.getLogger(__name__)

EMBEDDED = ("[local]", "[auto]", "[collection]")
"""Values of `--flink_master` for a Flink in the job server, which ends with it."""
CANCEL_S = 330.0
"""Seconds for a cancelled job to end: Flink ends a task manager whose tasks have not ended after its
`task.cancellation.timeout`, 180 s or what our manifests set."""
POLL_S = 0.25
_APPEARS_S = 5.0
"""Seconds in which a submitted job appears, if a stop came during its submission."""
_REQUEST_S = 10.0
_MAX_REPLY = 1 << 24
_ENDED = ("FINISHED", "CANCELED", "FAILED")


class UnsupportedFlink(RuntimeError):
    """The cluster does not respond, has another Flink version than the job server, or too few task slots."""


class UncancelledJob(RuntimeError):
    """A job of the cluster has not ended, although it was cancelled."""


@contextmanager
def sole_job(master: str, name: str) -> Iterator[None]:
    """Cancel what has the name `name` at the Flink `master` before, and in the end; the context value is None.

    Raises UnsupportedFlink and UncancelledJob; in the end only if the `with` block has raised nothing.
    """
    earlier = cancel_jobs(master, name)
    try:
        yield
    except BaseException:
        with suppress(UnsupportedFlink, UncancelledJob):  # the next submission cancels it
            cancel_jobs(master, name)
        raise
    cancel_jobs(master, name, wait_for_other_than=earlier)


def cancel_jobs(
    master: str, name: str, within_s: float = CANCEL_S, wait_for_other_than: Collection[str] | None = None
) -> list[str]:
    """Cancel each job with the name `name` of the Flink at `master`, wait until all have ended, and return their ids,
    with those that had ended before.

    With `wait_for_other_than`, a job that is not one of these may appear only in a moment. Raises UnsupportedFlink if
    no Flink responds, UncancelledJob with the ids of jobs that have not ended `within_s` seconds later.
    """
    began = time.monotonic()
    while True:
        jobs = _jobs(master, name)
        running = [job for job, state in jobs.items() if state not in _ENDED]
        waited_s = time.monotonic() - began
        awaited = wait_for_other_than is not None and not jobs.keys() - set(wait_for_other_than)
        if not running and not (awaited and waited_s < _APPEARS_S):
            return list(jobs)
        if running and waited_s > within_s:
            raise UncancelledJob(
                f"job {', '.join(running)} ({name}) of the Flink at {master} has not ended {within_s:g} s after it was "
                "cancelled, and may run on: see its tasks in Flink's interface"
            )
        for job in running:
            if jobs[job] != "CANCELLING":
                _cancel(master, job, name)
        time.sleep(POLL_S)


def _jobs(master: str, name: str) -> dict[str, str]:
    """The states of the jobs with the name `name`, by their ids."""
    listed = read_value(master, "/jobs/overview", "jobs")
    return {job["jid"]: job["state"] for job in listed if job["name"] == name}


def _cancel(master: str, job: str, name: str) -> None:
    log.info("job %s (%s) of the Flink at %s is cancelled", job, name, master)
    try:
        open_url(_url(master, f"/jobs/{job}?mode=cancel"), _REQUEST_S, method="PATCH").close()
    except (OSError, http.client.HTTPException) as error:  # it has ended meanwhile, or will be requested again
        log.info("Flink's response to that: %s", error)


def read_value(master: str, path: str, key: str) -> Any:
    """The value of `key` that the REST interface at `master`, `host:port` or a URL, gives at `path`.

    Raises UnsupportedFlink.
    """
    url = _url(master, path)
    try:
        with open_url(url, _REQUEST_S) as reply:
            return json.loads(reply.read(_MAX_REPLY))[key]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise UnsupportedFlink(
            f"no Flink responds at {url} ({error or type(error).__name__}): set --flink_master to the address of its "
            f"REST interface"
        ) from error


def _url(master: str, path: str) -> str:
    return f"{master if '://' in master else f'http://{master}'}{path}"
