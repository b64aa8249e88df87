"""A run as systemd units: one for each role, a template for an indexed role, and a target for all of them."""

from __future__ import annotations

from infra.deploy.units import DeploymentPlan, Unit

NO_RESTART = 2
"""Exit code of a process whose configuration is invalid."""


def unit_files(plan: DeploymentPlan) -> dict[str, str]:
    """The text of each unit file, by its name."""
    files = {_file(unit): _service(plan, unit) for unit in plan.units}
    wanted = " ".join(name for unit in plan.units for name in _instances(unit))
    files["laminar-run.target"] = (
        f"[Unit]\nDescription=All pipelines of run {plan.run}\nWants={wanted}\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    return dict(sorted(files.items()))


def _file(unit: Unit) -> str:
    return f"laminar-{unit.name}{'@' if unit.indexed else ''}.service"


def _instances(unit: Unit) -> list[str]:
    if not unit.indexed:
        return [_file(unit)]
    return [f"laminar-{unit.name}@{index}.service" for index in range(unit.first, unit.first + unit.count)]


def _service(plan: DeploymentPlan, unit: Unit) -> str:
    lines = [
        "[Unit]",
        f"Description={unit.name} of run {plan.run}",
        "After=network-online.target",
        "Wants=network-online.target",
        "PartOf=laminar-run.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "User=laminar",
        f"ExecStart=/usr/bin/env {' '.join(unit.command('%i'))}",
        "Restart=on-failure",
        "RestartSec=5",
        f"RestartPreventExitStatus={NO_RESTART}",
        "KillSignal=SIGTERM",
        "TimeoutStopSec=60",
        f"CPUQuota={round(unit.cpus * 100)}%",
        f"MemoryMax={unit.memory_gib}G",
        "",
        "[Install]",
        "WantedBy=laminar-run.target",
        "",
    ]
    return "\n".join(lines)
