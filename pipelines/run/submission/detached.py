"""Detached submissions (`laminar submit --detach`): a respawner process keeps the pipeline running.

The respawner (`respawner.py`) submits the pipeline, and submits it again when its job ends without a stop request, also
when the runner has lost it. After a restart of the machine, `laminar runs resume` starts the respawners again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from infra.processes import spawn
from infra.store.errors import StoreError
from infra.store.ownership import remove_store
from operators.relay.config import AUTO
from pipelines.config import Config, ConfigDraft, ConfigProblems, load_config, save_config
from pipelines.distribution import PYTHON
from pipelines.inspect.run_files import AUDIT_FILE, CONFIG_FILE, SUBMITTED
from pipelines.inspect.run_folders import has_ended, read_any, run_command
from pipelines.inspect.submissions import Submission, date_start, read_submission, submissions
from pipelines.roles import ALL_SHARDS, WITH_STORE, Role, submitted_process
from pipelines.run.paths import with_absolute_paths
from pipelines.run.state import link_latest
from pipelines.run.zygote_process import temporary_path
from pipelines.shards import store_folder


class AlreadySubmitted(RuntimeError):
    """The role has a respawner already."""


def detach(draft: ConfigDraft, pipeline: str, index: int, runner: str, options: Sequence[str]) -> Submission:
    """Submit shard `index` of `pipeline`, or all shards, to `runner` with a respawner.

    Raises AlreadySubmitted, and ConfigProblems if the role cannot run with `draft`, this machine or its Kafka.
    """
    config = with_absolute_paths(draft.config)
    submission = Submission(config.run_folder, pipeline, index, runner, tuple(options))
    if config.run.name:
        refuse_submitted(config, pipeline, index, detached=True)
    for before in submissions(config.run_folder):
        if before.file == submission.file:
            submission = replace(
                submission, worker=before.worker, worker_created=before.worker_created, down_s=before.down_s
            )
    _refuse_in_foreground(config, submission)
    from pipelines.run.inputs import record_inputs  # larger imports
    from pipelines.run.run_names import with_run_name
    from pipelines.run.submission.role_checks import place_problems, sections_of, submission_problems, trial_problems

    place = place_problems(with_run_name(config, submission.config), submission)
    problems = draft.problems_and([*submission_problems(config, submission), *place])
    if found := trial_problems(config, submission, problems, draft.replaced):
        raise ConfigProblems(found)
    _make_folders(config, submission.file)
    save_config(config, submission.config)
    record_inputs(config, submission.inputs, sections_of(config, submission))
    return start_respawner(submission)


def refuse_submitted(config: Config, pipeline: str, index: int, *, detached: bool = False) -> None:
    """Raise AlreadySubmitted if a role of this submission has a respawner, other than the parent of this process.

    If it is not `detached`, also if such a role has a process that has lost its respawner: it would be fenced.
    """
    wanted = submitted_process(config, pipeline, index).roles
    for each in submissions(config.run_folder):
        respawner = each.respawner()
        process = respawner or (None if detached else each.working_process())
        others = each.roles(config)
        if process is None or each.pid == os.getppid() or not _share_a_role(wanted, others):
            continue
        name, folder = each.role.name, config.run_folder
        which = "its respawner" if respawner is not None else "its process"
        raise AlreadySubmitted(
            f"{name} of run {config.run.name} is submitted already; {which} is process {process.pid}: "
            f"`{run_command(folder, 'runs status')}` shows it, "
            f"`{run_command(folder, f'runs stop --role {name}')}` ends it"
        )


def _refuse_in_foreground(config: Config, submission: Submission) -> None:
    """Raise AlreadySubmitted if a process of `in_foreground` has a role of `submission`: it would be fenced.

    The process that a killed respawner has left is taken over.
    """
    wanted = submission.roles(config)
    for role, pid in roles_here(config):
        if pid != submission.worker and _share_a_role([role], wanted):
            raise AlreadySubmitted(
                f"{role.name} of run {config.run.name} runs in the foreground, as process {pid}: `kill {pid}` drains "
                "and ends it; then submit again"
            )


def roles_here(config: Config) -> Iterator[tuple[Role, int]]:
    """The roles of the run that processes of `in_foreground` have on this machine, each with its process."""
    names = (line.rpartition("@")[2] for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines())
    prefix = _socket_prefix(config)
    rests = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    for found in filter(None, (re.fullmatch(r"([a-z-]+)/(-?\d+)/(\d+)", rest) for rest in rests)):
        if _is_own(pid := int(found[3])):
            yield Role(found[1], int(found[2])), pid


def _is_own(pid: int) -> bool:
    """Whether process `pid` lives and is this user's; any user can bind any name."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False


@contextmanager
def in_foreground(config: Config, roles: Sequence[Role]) -> Iterator[None]:
    """Show `detach` on this machine that this process has `roles`: as names of sockets, which end with the process."""
    prefix = _socket_prefix(config)
    with ExitStack() as stack:
        for role in roles:
            held = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            held.bind(f"\0{prefix}{role.pipeline}/{role.index}/{os.getpid()}")
        yield


def record_foreground(config: Config, name: str) -> None:
    """Keep the configuration of the process `name`, by which commands on this machine find the run and its Kafka.

    That of `laminar run` or of a detached role has them already. The folder may be read-only.
    """
    config = with_absolute_paths(config)
    file = config.run_folder / SUBMITTED / f"{name}.toml"
    if (config.run_folder / CONFIG_FILE).exists() or file.with_suffix(".json").exists():
        return
    with suppress(OSError):
        _make_folders(config, file)
        date_start(config.run_folder)
        save_config(config, file)


def _make_folders(config: Config, file: Path) -> None:
    is_new_run = not config.run_folder.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    if is_new_run:
        link_latest(config.run_folder)


def _socket_prefix(config: Config) -> str:
    config = with_absolute_paths(config)  # as of a detached process, wherever this one was started
    run = f"{config.run.name} {config.kafka.bootstrap_servers} {config.kafka.client_properties}"
    return f"laminar-submit/{hashlib.sha256(run.encode()).hexdigest()[:32]}/"


def _share_a_role(some: Sequence[Role], others: Sequence[Role]) -> bool:
    """Whether a role is among both; all shards of a pipeline include each."""
    return any(
        one.pipeline == other.pipeline and (one.index == other.index or ALL_SHARDS in (one.index, other.index))
        for one in some
        for other in others
    )


def start_respawner(submission: Submission) -> Submission:
    """Start the respawner of `submission`; returns it as it is then."""
    run, down_s = read_any(submission.folder), submission.down_s
    if not run.supervised:
        (run.folder / AUDIT_FILE).unlink(missing_ok=True)  # the run goes on, so it is not of its end
        if (ended_at := run.state.get("ended_at")) is not None:
            down_s += max(0.0, time.time() - ended_at)
    submission.log.parent.mkdir(parents=True, exist_ok=True)
    submission = replace(submission, pid=None, state="up", error=None, last_error=None, ended_at=None, down_s=down_s)
    submission.write()
    command = [*PYTHON, "-m", "pipelines.run.submission.respawner", str(submission.file)]
    process = spawn(command, submission.log, die_with_parent=False)
    started = replace(submission, pid=process.pid, pid_created=process.create_time())
    started.write()
    return started


def stop(submission: Submission, deadline: float) -> bool:
    """Send SIGTERM: the pipeline drains. Wait until `deadline` (monotonic). Returns whether it has ended."""
    respawner = submission.respawner()
    process = respawner or submission.working_process()
    if process is not None:
        process.send_signal(signal.SIGTERM)
        if not has_ended(process, deadline):
            return False
    if respawner is None:  # it was killed: nobody else records the end, and removes the temporary files
        shutil.rmtree(temporary_path(submission.log), ignore_errors=True)
        if process is not None:
            submission.ended("ended").write()
    return True


def remove(submission: Submission, deadline: float) -> bool:
    """As `stop`; the role is then not resumed with the run. Returns whether it has ended."""
    if not stop(submission, deadline):
        return False
    replace(read_submission(submission.file), state="removed", error=None).write()
    return True


def remove_unused_store(submitted: Sequence[Submission]) -> str:
    """Remove the weight store of the run on this machine, whose roles have ended; returns what has become of it.

    Empty without a store, and with one that the configuration names: that one may be shared.
    """
    configs = [load_config(each.config) for each in submitted if each.pipeline in WITH_STORE and each.config.is_file()]
    if not configs or configs[0].relay.store != AUTO or not (store := store_folder(configs[0])).is_dir():
        return ""
    try:
        remove_store(store)
    except StoreError as error:
        return f"its weight store stays: {error}"
    return f"its weight store {store} is removed: a resumed trainer publishes again from its checkpoint"
