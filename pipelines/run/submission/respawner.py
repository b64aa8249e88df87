"""Keeps one submitted pipeline running: `python -m pipelines.run.submission.respawner FILE`.

It imports few modules, because it runs as long as the pipeline. Exit code 0 of the pipeline: it has drained. 2: it
cannot run with this configuration. After any other exit it is submitted again, with growing pauses, up to a limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from infra.escaping import print_escaped
from pipelines.distribution import LAMINAR
from pipelines.inspect.submissions import Submission, read_submission
from pipelines.roles import ALL_SHARDS, CANNOT_RUN, SHARDED
from pipelines.run.restarts import Restarts


class Respawner:
    """Runs `submission` and resubmits it."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self) -> None:
        """Run until the pipeline has drained, is stopped or fails for good."""
        deaths = Restarts()
        while not self._stopping.is_set():
            code = self._submit()
            if code == 0 or self._stopping.is_set():
                break
            pause = None if code == CANNOT_RUN else deaths.record_death()
            if pause is None:
                reason = "it cannot run" if code == CANNOT_RUN else f"it died {deaths.rate()}"
                error = f"{reason}; last exit code: {code}; see {self._submission.log}"
                self._write(replace(self._submission, state="failed", error=error))
                return
            print_escaped(f"{self._submission.role.name} exited with code {code}; submitting it again")
            self._write(replace(self._submission, restarts=self._submission.restarts + 1))
            self._stopping.wait(pause)
        self._write(replace(self._submission, state="ended"))

    def _submit(self) -> int:
        submission = self._submission
        arguments = ["submit", submission.pipeline, str(submission.config), "--runner", submission.runner]
        if submission.pipeline in SHARDED and submission.index != ALL_SHARDS:
            arguments += ["--index", str(submission.index)]
        with tempfile.TemporaryDirectory(prefix="laminar-submitted-", ignore_cleanup_errors=True) as temporary_folder:
            self._child = subprocess.Popen(
                [*LAMINAR, *arguments, "--", *submission.options], env={**os.environ, "TMPDIR": temporary_folder}
            )
            if self._stopping.is_set():  # stopped between the check and the start
                self._child.terminate()
            return self._child.wait()

    def _write(self, submission: Submission) -> None:
        self._submission = submission
        submission.write()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def _read_own(file: Path) -> Submission:
    """The submission in `file`, once it names this process: it is rewritten after the process is started."""
    while (submission := read_submission(file)).pid != os.getpid():
        time.sleep(0.01)
    return submission


if __name__ == "__main__":
    Respawner(_read_own(Path(sys.argv[1]))).run()
