"""`laminar doctor`: what can run on this machine, what is missing, and the commands that fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Brokers, JsonOption
from pipelines.present.output import Report
from pipelines.run.doctor.checks import Finding, can_run, judge
from pipelines.run.doctor.machine import as_json, observe, remove_stale_stores

app = Commands()
_SIGNS = {"ok": "ok", "limited": "--", "missing": "NO"}


@app.command()
def doctor(
    kafka: Brokers,
    stores: Annotated[
        list[str] | None, typer.Argument(help="With --clean: remove only these stores, by the names that it lists.")
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove weights that ended runs left in shared memory.")
    ] = False,
    json: JsonOption = False,
) -> Report:
    """Check this machine: what can run, what is missing, and how to fix it. Exits with 1 if `laminar run` cannot work.

    \b
    Examples:
      laminar doctor
      laminar doctor --clean
      laminar doctor --clean laminar-gcd-1f00ba12
      laminar doctor -b kafka.example:9092 --json
    """
    if stores and not clean:
        raise ValueError(f"{stores[0]}: stores are named with --clean, which removes them")
    removed = [str(root) for root in remove_stale_stores(stores or ())] if clean else []
    machine = observe(kafka.client() if kafka.given else None)
    findings = judge(machine)
    data = {
        "can_run": can_run(findings),
        "findings": [asdict(finding) for finding in findings],
        "removed": removed,
        "machine": as_json(machine),
    }
    return Report(data, lambda: _text(findings, removed), as_json=json, exit_code=0 if can_run(findings) else 1)


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
