"""Detached submissions (`laminar submit --detach`): a respawner process keeps the pipeline running.

The respawner (`respawner.py`) submits the pipeline, and submits it again when its job has ended unasked. So a job that
the runner lost is found again; after a restart of the machine `laminar runs resume` starts the respawners anew.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from infra.processes import is_running, spawn
from pipelines.config import Config, save_config
from pipelines.inspect.submissions import Submission, submissions
from pipelines.roles import Role
from pipelines.run.paths import with_absolute_paths


class AlreadySubmitted(RuntimeError):
    """The role is kept already."""


def detach(config: Config, role: Role, runner: str, options: Sequence[str]) -> Submission:
    """Keep `role` of `config`'s run on `runner` from now on. Raises AlreadyThere."""
    config = with_absolute_paths(config)
    made = Submission(config.run_folder, role.pipeline, role.index, runner, tuple(options))
    for before in submissions(config.run_folder):
        if before.file == made.file and before.respawner() is not None:
            raise AlreadySubmitted(f"{role.name} of run {config.run.name} is kept by process {before.pid} already")
    made.file.parent.mkdir(parents=True, exist_ok=True)
    save_config(config, made.config)
    return start_respawner(made)


def start_respawner(submission: Submission) -> Submission:
    """Start a keeper for `submission`."""
    submission.log.parent.mkdir(parents=True, exist_ok=True)
    submission = replace(submission, pid=None, stand="up", error=None)
    submission.write()
    process = spawn(
        [sys.executable, "-m", "pipelines.run.submission.respawner", str(submission.file)],
        submission.log,
        die_with_parent=False,
    )
    kept = replace(submission, pid=process.pid, pid_created=process.create_time())
    kept.write()
    return kept


def stop(submission: Submission, deadline: float) -> bool:
    """Ask `submission` to drain and wait for its keeper until `deadline` (monotonic); whether it is gone."""
    process = submission.respawner()
    if process is None:
        return True
    process.send_signal(signal.SIGTERM)
    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
