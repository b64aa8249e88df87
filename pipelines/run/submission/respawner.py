"""Keeps one submitted pipeline running: `python -m pipelines.run.submission.respawner FILE`.

It imports few modules, because it runs as long as the pipeline. That of the trainer audits the run, too. Exit code 0 of
the pipeline: it has drained. 2: it cannot run with this configuration. After any other exit it is submitted again, with
growing pauses, up to a limit. A process of the pipeline whose respawner was killed is stopped first. If the run's
folder is deleted, the pipeline is stopped, and not submitted again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil

from infra.escaping import print_escaped
from infra.files import is_out_of_space
from pipelines.distribution import LAMINAR
from pipelines.inspect.run_folders import has_ended
from pipelines.inspect.submissions import Submission, read_submission
from pipelines.roles import ALL_SHARDS, CANNOT_RUN, SHARDED
from pipelines.run.background_audit import BackgroundAudit
from pipelines.run.restarts import Restarts, exit_text
from pipelines.run.zygote_process import temporary_folder
from pipelines.run_config import RunConfig

PREDECESSOR_S = 60.0
"""How long a process whose respawner was killed may drain; then its successor fences it."""
DELETED_S = 60.0
"""How long the pipeline of a deleted run may drain; then it is killed."""
POLL_S = 1.0
AUDITING = ("trainer", 0)
"""The role, and its index, whose respawner audits the run: each run has exactly one process of it, on any runner."""
LOG_TAIL_BYTES = 64 * 1024
ERROR = "laminar: "
"""Beginning of the line of an error of the command `laminar`."""


class Respawner:
    """Runs `submission` and resubmits it."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._child: subprocess.Popen[bytes] | None = None
        self._log_begin = 0
        self._lock: int | None = None
        self._stopping = threading.Event()
        self._audits = self._open_audits()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _open_audits(self) -> BackgroundAudit | None:
        submission = self._submission
        if (submission.pipeline, submission.index) != AUDITING:
            return None
        run = tomllib.loads(submission.config.read_text(encoding="utf-8")).get("run", {})  # `load_config` imports much
        every_s = run.get("audit_every_s", RunConfig.audit_every_s)
        return BackgroundAudit(submission.config, every_s, print_escaped, lambda _: None, folder=submission.folder)

    def run(self) -> None:
        """Run until the pipeline has drained, is stopped or fails for good."""
        try:
            self._run()
        finally:
            if self._audits is not None:
                self._audits.close()
            if self._lock is not None:
                os.close(self._lock)

    def _run(self) -> None:
        deaths = Restarts()
        self._stop_predecessor()
        self._lock_log()
        while not self._stopping.is_set():
            code = self._submit()
            if self._is_deleted():
                print_escaped(f"{self._submission.file} has been deleted: {self._submission.role.name} is stopped")
                return
            if code == 0 or self._stopping.is_set():
                break
            pause = None if code == CANNOT_RUN else deaths.record_death()
            submission = self._submission
            why = exit_text(code) if code < 0 else last_error(submission.log, self._log_begin)
            if pause is None:
                reason = "it cannot run" if code == CANNOT_RUN else f"it died {deaths.rate()}, last with code {code}"
                self._write(submission.ended("failed", f"{reason}: {why} (see {submission.log})"))
                return
            print_escaped(f"{submission.role.name} {exit_text(code)}; submitting it again")
            restarts, error = submission.restarts + 1, f"{why} (see {submission.log})"
            self._write(replace(submission, restarts=restarts, last_error=error, last_ended_at=time.time()))
            self._stopping.wait(pause)
        self._write(self._submission.ended("ended"))

    def _submit(self) -> int:
        submission = self._submission
        arguments = ["submit", submission.pipeline, str(submission.config), "--runner", submission.runner]
        if submission.pipeline in SHARDED and submission.index != ALL_SHARDS:
            arguments += ["--index", str(submission.index)]
        folder = temporary_folder(submission.log)  # without what a killed respawner has left there
        try:
            self._log_begin = submission.log.stat().st_size if submission.log.exists() else 0
            self._child = subprocess.Popen(
                [*LAMINAR, *arguments, "--", *submission.options],
                env={**os.environ, "TMPDIR": folder},
                pass_fds=() if self._lock is None else (self._lock,),
            )
            created = psutil.Process(self._child.pid).create_time()  # it stays until it is waited for
            self._write(replace(submission, worker=self._child.pid, worker_created=created))
            if self._stopping.is_set():  # stopped between the check and the start
                self._child.terminate()
            return self._wait(self._child)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_S)
            if self._is_deleted():
                child.terminate()
                try:
                    return child.wait(DELETED_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    return child.wait()
            if self._audits is not None:
                self._audits.poll()

    def _is_deleted(self) -> bool:
        """Whether the run's folder was deleted, so that its file is gone, or is that of another submission by now."""
        try:
            return read_submission(self._submission.file).pid != self._submission.pid
        except FileNotFoundError:
            return True
        except (OSError, ValueError):  # it is being overwritten, or storage does not answer
            return False

    def _lock_log(self) -> None:
        """Lock the log until this process and that of the pipeline have ended: other containers see no processes."""
        with suppress(OSError):  # of a log that was removed, or a file system without locks
            self._lock = os.open(self._submission.log, os.O_WRONLY | os.O_APPEND)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _stop_predecessor(self) -> None:
        """Stop the process of the pipeline that an earlier respawner has left behind."""
        process = self._submission.working_process()
        if process is None:
            return
        print_escaped(f"process {process.pid}, whose respawner has ended, is stopped: this start supersedes it")
        with suppress(psutil.NoSuchProcess):
            process.terminate()
            if not has_ended(process, time.monotonic() + PREDECESSOR_S):
                print_escaped(f"process {process.pid} has not ended after {PREDECESSOR_S:g} s: it will be fenced")

    def _write(self, submission: Submission) -> None:
        self._submission = submission
        try:
            submission.write()
        except OSError as error:
            # Else the pipeline would be left without a respawner.
            if not (is_out_of_space(error) or self._is_deleted()):
                raise

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def last_error(log: Path, begin: int = 0) -> str:
    """The last error that the pipeline has printed into its log, from `begin` on; else the last line.

    A log that was removed is as one that is empty.
    """
    if not log.exists():
        log = Path(os.devnull)
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return next(reversed(errors or lines), "its log is empty")


def _read_own(file: Path) -> Submission:
    """The submission in `file`, once it names this process: it is rewritten after the process is started."""
    while (submission := read_submission(file)).pid != os.getpid():
        time.sleep(0.01)
    return submission


if __name__ == "__main__":
    Respawner(_read_own(Path(sys.argv[1]))).run()
