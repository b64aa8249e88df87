"""`laminar run` around the supervisor: the run's name and folder, its checks, audit, summary and report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from infra.files import describe_free_space, is_full, is_out_of_space, write_atomically
from pipelines.config import Config, ConfigError, ConfigProblems, load_config, read_config
from pipelines.inspect.run_files import (
    AUDIT_FILE,
    AUDIT_SO_FAR_FILE,
    CONFIG_FILE,
    LOGS,
    METRICS_FILE,
    REPORT_FILE,
    STATE_FILE,
    SUMMARY_FILE,
)
from pipelines.inspect.run_folders import RunFolder, read_any, run_command
from pipelines.inspect.run_times import phases_at_resume
from pipelines.present.output import Report
from pipelines.present.report.closing import closing_lines
from pipelines.present.report.html import render_report
from pipelines.present.report.summary import summarise
from pipelines.present.report.verdict import is_failing
from pipelines.present.view.console import console
from pipelines.present.view.live import LiveView
from pipelines.run.inputs import INPUTS_FILE, accept_inputs, changed_inputs, changed_text, record_inputs, set_options
from pipelines.run.resumable import check_resumable, keep_model
from pipelines.run.run_guard import RunFailing
from pipelines.run.run_kafka import BrokerDiskFull, RunLost
from pipelines.run.run_names import name_problems, with_free_name
from pipelines.run.start_checks import problems_of
from pipelines.run.state import RunStateFile, link_latest, remove_run, runs_locked
from pipelines.run.stop_requests import Interrupted, StopRequests
from pipelines.run.supervisor import Supervisor

MAX_DETAILS = 8
"""Lines of an error's details in state.json."""


def run_locally(
    config: Config,
    file: Path,
    stops: StopRequests,
    *,
    changes: Sequence[str] = (),
    default_name: bool = False,
    as_json: bool = False,
) -> Report:
    """Run `config`, read from `file` with `changes`, on this machine, until its goal or a stop request in `stops`.

    `check_start` has found no problem. The report's exit code is 0 if the goal was reached, the audit passed and not
    all trajectories have errors. Stop requests after the audit have no effect: the files of an ended run are always
    written. A `default_name` that another start has taken meanwhile gets a suffix.

    Raises ConfigError before a topic is written, and the errors of `Supervisor.run`.
    """
    config.run.folder.mkdir(parents=True, exist_ok=True)
    with runs_locked(config.run.folder):
        if default_name:
            config = with_free_name(config)
        state = _claim_folder(config)
    folder = state.folder
    before = link_latest(folder)
    try:
        return _supervised(config, state, stops, as_json, file=file, changes=changes)
    except ConfigError:
        with runs_locked(folder.parent):
            # No topic was written: there is nothing to look at or to resume.
            if not (folder / CONFIG_FILE).exists() and state.is_own():
                remove_run(folder, before)
        raise


def _claim_folder(config: Config) -> RunStateFile:
    """Create the folder of a new run, with its state.json. Raises ConfigProblems if a run has it: another start took it
    while this one's checks and imports ran."""
    folder = config.run_folder
    if problems := list(name_problems(config)):
        raise ConfigProblems(problems)
    if (folder / STATE_FILE).exists():  # of a run without topics
        remove_run(folder, None)
    (folder / LOGS).mkdir(parents=True)
    steps, warn_steps = config.trainer.optimizer_steps, config.run.warn_steps
    now = time.time()
    started_at = min(psutil.Process().create_time(), now)  # before the imports, which take seconds
    phases = {"starting": now - started_at}
    state = RunStateFile(folder, config.run.name, steps, phases=phases, started_at=started_at, warn_steps=warn_steps)
    state.write()  # first: a folder without it is not a run, which no command removes
    return state


def resume_locally(
    run: RunFolder,
    stops: StopRequests,
    *,
    changes: Sequence[str] = (),
    accept_changes: bool = False,
    as_json: bool = False,
) -> Report:
    """Resume `run`, whose supervisor has ended, from its log and its newest checkpoint; otherwise as `run_locally`.

    `changes` ("section.key=value") of RESUMABLE keys hold from now on; more optimizer steps extend a run that has
    reached its goal. Files that the run reads and that have changed are used with `accept_changes` only. Raises
    ConfigError if it ended before its topics were created, and for another change.
    """
    file = run.folder / CONFIG_FILE  # written after the run's topics are created, so their records are this run's
    if not file.exists():
        raise ConfigError(f"run {run.run} ended before its topics were created ({file} is missing): start a new run")
    draft, before = read_config(file, changes), load_config(file)
    config, refused = draft.config, []
    try:
        check_resumable(before, config, draft.replaced)
    except ConfigError as error:
        refused.append(str(error))
    problems = [*refused, *draft.problems_and(problems_of(config, new=False))]
    readable = before if draft.problems else config
    if (changed := changed_inputs(readable, run.folder / INPUTS_FILE)) and not accept_changes:
        problems.append(changed_text(run.folder, changed, changes))
    if problems:
        raise ConfigProblems(problems)

    def begin() -> None:
        if changed:
            accept_inputs(config, run.folder / INPUTS_FILE, changed)
        keep_model(run.folder, before, config)
        # Those of the end before would be taken for those of the run as it is.
        for name in (SUMMARY_FILE, AUDIT_FILE, AUDIT_SO_FAR_FILE):
            (run.folder / name).unlink(missing_ok=True)

    with runs_locked(run.folder.parent):
        if read_any(run.folder).status == "running":
            raise ConfigError(f"run {run.run} is running: another `laminar runs resume` was first")
        resumed = _Resumed(run.folder / STATE_FILE, begin, set_options(changes), bool(changed))
        state = _resumed_state(run, config)
        state.write()
    return _supervised(config, state, stops, as_json, resumed=resumed)


def _resumed_state(run: RunFolder, config: Config) -> RunStateFile:
    now = time.time()
    return RunStateFile(
        run.folder,
        run.run,
        config.trainer.optimizer_steps,
        bootstrap_servers=run.state.get("bootstrap_servers") or "",
        client_properties=run.state.get("client_properties") or "",
        phases=phases_at_resume(run.state, _alive_at(run.folder), now) if run.started_at else {},
        started_at=run.started_at or now,
        warn_steps=config.run.warn_steps,
    )


class _Resumed:
    """What changes in a run that is resumed when its checks have passed; if they fail, its state.json is put back.

    `options` of `runs resume` are printed for another try, with `accepts` also that changed files are accepted.
    """

    def __init__(self, file: Path, begin: Callable[[], None], options: str, accepts: bool) -> None:
        self._file, self._state, self._begin = file, file.read_text("utf-8"), begin
        self._options, self._accepts, self.begun = options, accepts, False

    def __call__(self) -> None:
        self._begin()
        self.begun = True

    @property
    def options(self) -> str:
        return f"{self._options} {'--accept-changes' * (self._accepts and not self.begun)}".strip()

    def put_back(self, state: RunStateFile) -> None:
        """Put state.json back if the run has not begun and no other process has resumed it since `state` ended."""
        with runs_locked(state.folder.parent):
            if not self.begun and state.is_own():
                write_atomically(self._file, self._state)


def _alive_at(folder: Path) -> float:
    """The time at which the run in `folder` last wrote a file that it writes all the time, in Unix seconds."""
    files = (folder / name for name in (STATE_FILE, METRICS_FILE))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _supervised(
    config: Config,
    state: RunStateFile,
    stops: StopRequests,
    as_json: bool,
    *,
    file: Path | None = None,
    changes: Sequence[str] = (),
    resumed: _Resumed | None = None,
) -> Report:
    folder, options = state.folder, ""
    try:
        if not (folder / INPUTS_FILE).exists():  # a new run, or one of an earlier release
            record_inputs(config, folder / INPUTS_FILE)
        shown = console(stderr=as_json, discard_if_closed=True)  # `laminar run | head` must not end the run
        with LiveView(shown, config.run.name, config.trainer.optimizer_steps) as view:
            audit = Supervisor(config, view, state, stops, resumed).run()
    except Interrupted as stop:
        state.end(f"{stop} before its goal", "stopped")
        answer = {"run": config.run.name, "error": state.error}
        text = f"{state.error}; its files are in {_relative_to_cwd(folder)}"
        if resumed is not None:
            options = resumed.options
            resumed.put_back(state)
        if (folder / CONFIG_FILE).exists():
            if resumed is None or resumed.begun:
                with suppress(OSError, ValueError):  # a full disk must not hide how to resume
                    _write_report(state, None)
            text += f"; to resume it: `{run_command(folder, 'runs resume', options)}`"
        return Report(answer, lambda: text, as_json, stop.exit_code)
    except BaseException as error:
        _end_failed(state, error, "" if resumed is None else resumed.options)
        if resumed is not None:
            with suppress(OSError):
                resumed.put_back(state)
        if isinstance(error, RunFailing):
            _write_report(state, None)
            error.add_note(f"its report: {_relative_to_cwd(folder / REPORT_FILE)}")
        raise
    state.end()
    write_atomically(folder / AUDIT_FILE, json.dumps(audit.to_json(), indent=1))
    summary = _write_report(state, {**audit.numbers(), "passed": audit.passed})
    code = 0 if audit.passed and not is_failing(summary) else 1
    return Report(summary, lambda: closing_lines(_relative_to_cwd(folder), summary, file, changes), as_json, code)


def _write_report(state: RunStateFile, audit: Mapping[str, Any] | None) -> dict[str, Any]:
    """Write summary.json and report.html of a run that has ended; returns the summary."""
    summary = summarise(state.folder, audit, state.phases)
    write_atomically(state.folder / SUMMARY_FILE, json.dumps(summary, indent=1))
    write_atomically(state.folder / REPORT_FILE, render_report(state.folder))
    return summary


def _end_failed(state: RunStateFile, error: BaseException, options: str = "") -> None:
    """Write to state.json why the run failed, and add to `error` how to resume it, if it can be, with `options`."""
    if (is_out_of_space(error) or is_full(state.folder)) and not isinstance(error, BrokerDiskFull):
        error.add_note(f"the disk is full: {describe_free_space(state.folder)}")
    notes = [*getattr(error, "detail_lines", ())[:MAX_DETAILS], *getattr(error, "__notes__", [])]
    reason = "; ".join([f"{type(error).__name__}: {error}", *notes])
    try:
        state.end(reason)
    except OSError as unwritten:
        if not isinstance(error, RunLost):  # its folder may be what was deleted
            error.add_note(f"{state.folder / STATE_FILE} could not be written: {unwritten}")
    if (state.folder / CONFIG_FILE).exists() and not isinstance(error, RunLost):
        if isinstance(error, RunFailing):
            options = f"{options} {error.resume}".strip()
        error.add_note(f"once that is fixed, resume the run: `{run_command(state.folder, 'runs resume', options)}`")


def _relative_to_cwd(folder: Path) -> Path:
    cwd = Path.cwd()
    return folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
