"""Detached submissions (`laminar submit --detach`): a respawner process keeps the pipeline running.

The respawner (`respawner.py`) submits the pipeline, and submits it again when its job ends without a stop request, also
when the runner has lost it. After a restart of the machine, `laminar runs resume` starts the respawners again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from infra.processes import spawn
from pipelines.config import Config, save_config
from pipelines.inspect.run_folders import has_ended
from pipelines.inspect.submissions import Submission, submissions
from pipelines.run.paths import with_absolute_paths
from pipelines.run.state import link_latest


class AlreadySubmitted(RuntimeError):
    """The role has a respawner already."""


def detach(config: Config, pipeline: str, index: int, runner: str, options: Sequence[str]) -> Submission:
    """Submit shard `index` of `pipeline`, or all shards, to `runner` with a respawner. Raises AlreadySubmitted."""
    config = with_absolute_paths(config)
    submission = Submission(config.run_folder, pipeline, index, runner, tuple(options))
    for before in submissions(config.run_folder):
        if before.file == submission.file and before.respawner() is not None:
            name = submission.role.name
            raise AlreadySubmitted(
                f"{name} of run {config.run.name} is submitted already; its respawner is process {before.pid}"
            )
    is_new_run = not config.run_folder.exists()
    submission.file.parent.mkdir(parents=True, exist_ok=True)
    if is_new_run:
        link_latest(config.run_folder)
    save_config(config, submission.config)
    return start_respawner(submission)


def start_respawner(submission: Submission) -> Submission:
    """Start a respawner for `submission`."""
    submission.log.parent.mkdir(parents=True, exist_ok=True)
    submission = replace(submission, pid=None, state="up", error=None)
    submission.write()
    process = spawn(
        [sys.executable, "-m", "pipelines.run.submission.respawner", str(submission.file)],
        submission.log,
        die_with_parent=False,
    )
    started = replace(submission, pid=process.pid, pid_created=process.create_time())
    started.write()
    return started


def stop(submission: Submission, deadline: float) -> bool:
    """Send SIGTERM: the pipeline drains. Wait until `deadline` (monotonic). Returns whether it has ended."""
    process = submission.respawner()
    if process is None:
        return True
    process.send_signal(signal.SIGTERM)
    return has_ended(process, deadline)
