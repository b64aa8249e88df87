"""Keeps one submitted pipeline running: `python -m pipelines.run.submission.respawner FILE`.

It imports little, because it lives as long as the run. Exit code 0 of the pipeline: it has drained. 2: it cannot run
with this configuration. After any other end it is submitted again, with growing pauses, until it is given up.
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

from pipelines.inspect.submissions import Submission, read_submission
from pipelines.roles import CANNOT_RUN
from pipelines.run.restarts import Restarts

LAMINAR = "from pipelines.cli.main import main; main()"


class Respawner:
    """Keeps `submission`."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self) -> None:
        """Until it has ended, or is given up."""
        deaths = Restarts()
        while not self._stopping.is_set():
            code = self._submit()
            if code == 0 or self._stopping.is_set():
                break
            pause = None if code == CANNOT_RUN else deaths.count()
            if pause is None:
                why = "it cannot run" if code == CANNOT_RUN else f"it died {deaths.rate()}"
                self._say(replace(self._submission, stand="failed", error=f"{why}, the last time with code {code}"))
                return
            print(f"{self._submission.role.name} ended with code {code}; submitting it again", flush=True)
            self._say(replace(self._submission, restarts=self._submission.restarts + 1))
            self._stopping.wait(pause)
        self._say(replace(self._submission, stand="ended"))

    def _submit(self) -> int:
        kept = self._submission
        words = ["submit", kept.pipeline, str(kept.config), "--index", str(kept.index), "--runner", kept.runner]
        with tempfile.TemporaryDirectory(prefix="laminar-submitted-", ignore_cleanup_errors=True) as scratch:
            self._child = subprocess.Popen(
                [sys.executable, "-c", LAMINAR, *words, "--", *kept.options], env={**os.environ, "TMPDIR": scratch}
            )
            if self._stopping.is_set():  # asked to between the two
                self._child.terminate()
            return self._child.wait()

    def _say(self, submission: Submission) -> None:
        self._submission = submission
        submission.write()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def _mine(file: Path) -> Submission:
    """What `file` says, once it names this process: it is written right after the start."""
    while (submission := read_submission(file)).pid != os.getpid():
        time.sleep(0.01)
    return submission


if __name__ == "__main__":
    Respawner(_mine(Path(sys.argv[1]))).run()
