"""`laminar doctor`: what can run on this machine, what is missing, and the commands that fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Brokers, JsonOption
from pipelines.cli.run import SetOption
from pipelines.config import Config, load_config
from pipelines.present.output import Report
from pipelines.run.doctor.checks import Finding, can_run, judge
from pipelines.run.doctor.machine import as_json, observe, remove_stale_stores
from pipelines.run.run_names import with_run_name

app = Commands()
_SIGNS = {"ok": "ok", "limited": "--", "missing": "NO"}


@app.command()
def doctor(
    kafka: Brokers,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml | STORE...]",
            help="A configuration, whose Kafka is checked for its run. With --clean: remove only these stores, by the "
            "names that it lists.",
        ),
    ] = None,
    changes: SetOption = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove weights that ended runs left in shared memory.")
    ] = False,
    json: JsonOption = False,
) -> Report:
    """Check this machine: what can run, what is missing, and how to fix it. Exits with 1 if `laminar run` cannot work.

    With -b or CONFIG.toml the settings of that Kafka are checked, too: transaction time-out, message size, retention,
    replication. CONFIG.toml is a run's configuration, as for `laminar run`: its time-out and topics are checked. Its
    other settings, files and code are checked by `laminar run --check`.

    \b
    Examples:
      laminar doctor
      laminar doctor --clean
      laminar doctor --clean laminar-gcd-1f00ba12
      laminar doctor -b kafka.example:9092 --json
      laminar doctor run.toml --set kafka.transaction_timeout_s=300
    """
    if clean and changes:
        raise typer.BadParameter("it changes a setting of CONFIG.toml, and --clean takes none", param_hint="--set")
    config = None if clean else _config(names or [], changes or [])
    if config is not None and kafka.given:
        raise typer.BadParameter(
            "CONFIG.toml names Kafka; change it with --set kafka.bootstrap_servers=HOST:PORT",
            param_hint="-b",
        )
    removed = [str(root) for root in remove_stale_stores(names or ())] if clean else []
    if config is not None and (config.kafka.bootstrap_servers or config.kafka.client_properties):
        machine = observe(config.kafka.client(), config)
    else:
        machine = observe(kafka.client() if kafka.given else None)
    findings = judge(machine)
    data = {
        "can_run": can_run(findings),
        "findings": [asdict(finding) for finding in findings],
        "removed": removed,
        "machine": as_json(machine),
    }
    return Report(data, lambda: _text(findings, removed), as_json=json, exit_code=0 if can_run(findings) else 1)


def _config(names: Sequence[str], changes: Sequence[str]) -> Config | None:
    if len(names) > 1 or (names and not Path(names[0]).exists()):
        raise ValueError(f"{names[-1]} is not a configuration file; stores are named with --clean, which removes them")
    if changes and not names:
        raise typer.BadParameter("it changes a setting of CONFIG.toml, which is not given", param_hint="--set")
    return with_run_name(load_config(Path(names[0]), changes), Path(names[0])) if names else None


def _text(findings: Sequence[Finding], removed: Sequence[str]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = [f"removed {path}" for path in removed]
    for finding in findings:
        lines.append(f"{_SIGNS[finding.verdict]}  {finding.name:{width}}  {finding.detail}")
        if finding.fix is not None:
            lines.append(f"    {'':{width}}  -> {finding.fix}")
    missing = [finding.name for finding in findings if finding.verdict == "missing"]
    lines.append(f"laminar run cannot work here: {', '.join(missing)}" if missing else "laminar run can work here")
    return "\n".join(lines)
