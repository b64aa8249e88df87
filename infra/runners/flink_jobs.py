"""The jobs of a Flink cluster by its REST interface: Beam's job server submits one, but cannot cancel it.

A request to cancel only ends the wait of the job server (`JobInvocation.cancel` interrupts its thread). The job would
run on, hold its task slots and commit beside a successor, also after its job server was killed. So the names of all
jobs of a role begin alike, and end in a number of their submission: each submission cancels those before it, and in the
end its own alone. One that was stopped for a while would cancel its successor otherwise.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
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
_NUMBER = "-[0-9a-f]{12}"
"""The number of a submission, at the end of its job's name."""


class UnsupportedFlink(RuntimeError):
    """The cluster does not respond, has another Flink version than the job server, or too few task slots."""


class UncancelledJob(RuntimeError):
    """A job of the cluster has not ended, although it was cancelled."""


def numbered(name: str) -> str:
    """The name of the job of a new submission of `name`, which all its submissions share."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


@contextmanager
def sole_job(master: str, job: str) -> Iterator[None]:
    """Cancel the jobs of earlier submissions at the Flink `master`, and in the end that with the name `job`, which
    `numbered` has given; the context value is None.

    Raises UnsupportedFlink and UncancelledJob; in the end only if the `with` block has raised nothing.
    """
    shared, own = re.sub(f"{_NUMBER}$", "", job), re.compile(re.escape(job))
    cancel_jobs(master, re.compile(f"{re.escape(shared)}({_NUMBER})?"))  # one of an earlier release has no number
    try:
        yield
    except BaseException:
        with suppress(UnsupportedFlink, UncancelledJob):  # the next submission cancels it
            cancel_jobs(master, own)
        raise
    cancel_jobs(master, own, appears_s=_APPEARS_S)


def cancel_jobs(master: str, name: re.Pattern[str], within_s: float = CANCEL_S, appears_s: float = 0.0) -> list[str]:
    """Cancel each job whose whole name is like `name` of the Flink at `master`, wait until all have ended, and return
    their ids, with those that had ended before.

    A first one may appear only within `appears_s` seconds. Raises UnsupportedFlink if no Flink responds, UncancelledJob
    with the ids of jobs that have not ended `within_s` seconds later.
    """
    began = time.monotonic()
    while True:
        jobs = _jobs(master, name)
        running = [job for job, (_, state) in jobs.items() if state not in _ENDED]
        waited_s = time.monotonic() - began
        if not running and (jobs or waited_s >= appears_s):
            return list(jobs)
        if running and waited_s > within_s:
            named = ", ".join(f"{job} ({jobs[job][0]})" for job in running)
            raise UncancelledJob(
                f"job {named} of the Flink at {master} has not ended {within_s:g} s after it was cancelled, and may "
                "run on: see its tasks in Flink's interface"
            )
        for job in running:
            own_name, state = jobs[job]
            if state != "CANCELLING":
                _cancel(master, job, own_name)
        time.sleep(POLL_S)


def _jobs(master: str, name: re.Pattern[str]) -> dict[str, tuple[str, str]]:
    """The names and the states of the jobs with a name like `name`, by their ids."""
    listed = read_value(master, "/jobs/overview", "jobs")
    return {job["jid"]: (job["name"], job["state"]) for job in listed if name.fullmatch(job["name"])}


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
