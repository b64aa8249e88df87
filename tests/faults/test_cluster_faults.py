"""Three brokers and roles on separate hosts, under partitions, pauses and kills: no anomaly in any log."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import role_threads
from faults.cluster_run import ROLES, ClusterRun, survive
from faults.network import NoNetwork

FAULTS = (
    *(("partition", "k2"), ("kill", "k3"), ("pause", "r1"), ("kill", "r2")),
    *(
        ("one-way partition", "k1"),
        ("isolation", "r1"),
        ("delay", "r2"),
        ("loss", "r1"),
        ("bandwidth", "k3"),
        ("pause", "k1"),
        ("kill", "r1"),
    ),
)
"""Each kind, and the death of each host of roles; `tests/soak/fault_campaign.py` draws more than a hundred."""


def test_start_roles_knows_every_role_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        of = staticmethod(lambda config, role: role.name)

        def __new__(cls, name: str, *rest: Any) -> Any:
            return name

    monkeypatch.setattr(role_threads, "RoleThread", Named)
    cluster = SimpleNamespace(client=SimpleNamespace(bootstrap_servers="127.0.0.1:9092"))
    run: Any = SimpleNamespace(folder=tmp_path, run="cluster", cluster=cluster)
    config = ClusterRun._config(run)
    for names in ROLES.values():
        assert sorted(map(str, role_threads.start_roles(config, names))) == sorted(names)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_on_three_brokers_survives_faults(tmp_path: Path) -> None:
    try:
        survived = survive(tmp_path, f"cluster-{os.getpid()}", seed=1, faults=FAULTS)
    except NoNetwork as reason:
        pytest.skip(str(reason))
    assert survived.anomalies == []
    assert len(survived.faults) == len(FAULTS)
    assert survived.trained > 0
