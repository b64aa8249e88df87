"""`laminar runs drain`: finish the trajectories of submitted pipelines, then stop the pipelines."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from infra.escaping import print_escaped
from pipelines.cli.options import JsonOption, RunOption, RunsFolder
from pipelines.inspect.run_folders import RUNS
from pipelines.present.output import Report


def drain_command(
    run: RunOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long the drain may take.")
    ] = 600.0,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Drain the pipelines submitted with --detach: stop new prompts, finish and score all trajectories, then stop the
    pipelines in order, and audit the run. Exits with 1 if --timeout passes before, or the audit failed.

    \b
    Examples:
      laminar runs drain --run first --timeout 3600
    """
    from pipelines.config import load_config
    from pipelines.inspect.log.pauses import is_paused
    from pipelines.inspect.run_folders import find_run, newest_audit, run_command
    from pipelines.inspect.submissions import submissions
    from pipelines.roles import DATA_PLANE
    from pipelines.run.drain import drain, final_audit
    from pipelines.run.submission.detached import remove_unused_store

    found = find_run(folder, run)
    running = [each for each in submissions(found.folder) if each.respawner() is not None]
    if not running:
        raise typer.BadParameter(f"no pipeline submitted with --detach is running in run {found.run}")
    deadline, config = time.monotonic() + timeout, load_config(running[0].config)
    if any(each.pipeline == DATA_PLANE for each in running) and not is_paused(config.kafka.client(), found.run):
        raise typer.BadParameter(
            f"the data plane of run {found.run} is one job, whose prompts cannot stop alone: "
            f"`{run_command(found.folder, 'runs pause')}` first"
        )
    left = drain(running, config, deadline, lambda line: print_escaped(line, err=True))
    passed, audited = (True, "") if left or found.supervised else final_audit(found.folder, config)
    data = {"run": found.run, "drained": not left, "running": left, "audit": newest_audit(found.folder)}
    store = "" if left else remove_unused_store(running)
    text = f"run {found.run} is drained" if not left else f"still running after {timeout:g} s: {', '.join(left)}"
    text = "; ".join(filter(None, (text, audited, store)))
    return Report(data, lambda: text, as_json=json, exit_code=0 if passed and not left else 1)
