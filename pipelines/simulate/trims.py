"""`laminar runs trim --execute` in a simulated run: the real plan and its execution, by a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra.kafka.properties import ClientProperties
from infra.kafka.simulated_inspection import InspectionClients
from infra.simulation.cluster import SimulatedCluster
from infra.simulation.process import SimulatedProcess
from pipelines.trim.plan import TrimRefused, execute, plan_trim

REQUEST_S = 0.004
"""Seconds from a request to its response."""


def start_trim(process: SimulatedProcess, cluster: SimulatedCluster, run: str, event: Callable[[str], None]) -> None:
    """Trim the log of `run` in `process`, which may be killed meanwhile; `event` is called with the result."""
    clients = InspectionClients(cluster, process.sleep, process.unix_ms, REQUEST_S)
    client = ClientProperties.of_clients(clients)

    def trim() -> None:
        try:
            plan = plan_trim(client, run, {}, now=process.unix_ms)
        except TrimRefused as refused:
            event(f"the trim is refused: {refused}")
            return
        event(f"trims the log to version {plan.trim_point.version}")
        execute(client, plan, Path())
        event(f"{sum(plan.trim_point.record_counts)} records are deleted")

    process.start("trim", trim)
