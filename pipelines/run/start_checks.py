"""The checks of a run before anything of it is started: all problems together, those that are found at once first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from infra.machine import visible_gpus
from infra.terminal import columns_of, print_wrapped, wrapped
from pipelines.config import Config, ConfigDraft, ConfigProblems
from pipelines.present.output import Report
from pipelines.present.progress import ProgressPrinter
from pipelines.run.paths import with_absolute_paths
from pipelines.run.preflight import gateway_host_problems, gpu_problems, missing_requirements, port_problems
from pipelines.run.run_names import name_problems, with_run_name
from pipelines.run.stop_requests import Interrupted, StopRequests
from pipelines.run.trial_result import TrialResult, check_text


def check_start(draft: ConfigDraft, stops: StopRequests, *, as_json: bool = False) -> Report | None:
    """Raise ConfigProblems if the run exists or its configuration cannot work; the report of a check that was stopped.

    If it cannot, prompts, rewards and environments are tried too; each problem is then printed when it is found.
    """
    try:
        with stops.interruptible(), ProgressPrinter("checks the settings and this machine", only_slow=True) as progress:
            known = known_problems(draft)
            if known and draft.config.run.check_timeout_s and not any(name_problems(draft.config)):
                found = _tried(draft, known, progress.begin, lambda line: print_wrapped(line, err=True))
                raise ConfigProblems(found.problems, are_printed=True)
            if known:
                raise ConfigProblems(known)
    except Interrupted as stop:
        text = f"{stop} before its start"
        return Report({"run": draft.config.run.name, "error": text}, lambda: text, as_json, stop.exit_code)
    return None


def check_locally(draft: ConfigDraft, file: Path, *, as_json: bool = False) -> Report:
    """Check `draft`, read from `file`, as a start does, and start nothing. The exit code is 1 if it has problems.

    For people each problem is printed when it is found.
    """
    with ProgressPrinter("checks the settings and this machine") as progress:
        known = known_problems(draft)
        printed = _quiet if as_json else print_wrapped
        found = _tried(draft, known, progress.begin, printed)

    def text() -> str:
        return wrapped(check_text(draft.config, file, found), columns_of(sys.stdout))

    return Report(asdict(found), text, as_json, 1 if found.problems else 0)


def named(draft: ConfigDraft, file: Path) -> ConfigDraft:
    """`draft`, read from `file`, of a run with a name, and with absolute paths."""
    return replace(draft, config=with_run_name(with_absolute_paths(draft.config), file))


def known_problems(draft: ConfigDraft) -> list[str]:
    """All problems of a new run that are found at once, without code of the user."""
    return list(draft.problems_and([*name_problems(draft.config), *problems_of(draft.config)]))


def problems_of(config: Config, *, new: bool = True) -> list[str]:
    """All requirements of a new or resumed run that this machine does not meet, without running code of the user."""
    found = (missing_requirements(config, new=new), gateway_host_problems(config), port_problems(config))
    return [problem for problems in (*found, gpu_problems(config, visible_gpus())) for problem in problems]


def _tried(
    draft: ConfigDraft, known: Sequence[str], begin: Callable[[str], None], print_line: Callable[[str], None]
) -> TrialResult:
    """The result of a trial beside the problems `known`. Prints each problem; calls `begin` with what is tried next."""
    for problem in known:
        print_line(f"problem: {problem}")
    if any(name_problems(draft.config)):  # a common slip, and that run has tried its code
        return TrialResult(list(known))
    begin("loads the libraries")
    from pipelines.run.trial import all_problems

    return all_problems(
        draft.config,
        known,
        lambda subject: begin(f"checks {subject}"),
        replaced=draft.replaced,
        report=lambda problem: print_line(f"problem: {problem}"),
    )


def _quiet(line: str) -> None:
    """Prints nothing: the problems are in the result."""
