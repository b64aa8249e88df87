"""Brokers and roles on separate hosts, under partitions, pauses, kills and wrong clocks: no anomaly in any log."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import role_threads
from faults.cluster_run import ROLES, ClusterRun, survive
from faults.network import Network, NoNetwork

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

BESIDE = {
    "r1": ("prompts", "placement", "score", "evaluation", "experience", "experience-1", "trainer", "rollout-1"),
    "r2": ("rollout-0",),
}
"""A host that has nothing but a rollout."""
AWAY: dict[str, dict[str, Any]] = {
    "run": {"time_scale": 2.0},
    "kafka": {"transaction_timeout_s": 10.0},
    "placement": {"heartbeat_timeout_s": 5.0},
    "rollout": {"processes": 2},
    "trainer": {"emulation": {"step_s": [[0, 2], [100_000, 4]]}},
}
"""Trajectories take seconds, so that the isolated host has some; a batch takes one or two."""
AWAY_S = 30.0
"""Seconds: longer than both time-outs of AWAY and the 10 s between two checks of Kafka for transactions to abort."""
CLOCK_S = 600.0


def test_start_roles_knows_every_role_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        of = staticmethod(lambda config, role: role.name)

        def __new__(cls, name: str, *rest: Any) -> Any:
            return name

    monkeypatch.setattr(role_threads, "RoleThread", Named)
    cluster = SimpleNamespace(client=SimpleNamespace(bootstrap_servers="127.0.0.1:9092"))
    for number, (hosts, changes) in enumerate([(ROLES, {}), (BESIDE, AWAY)]):
        (folder := tmp_path / str(number)).mkdir()
        run: Any = SimpleNamespace(folder=folder, run="cluster", cluster=cluster, changes=changes)
        config = ClusterRun._config(run)
        for names in hosts.values():
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


@contextmanager
def started(folder: Path, run: str, hosts: Mapping[str, Sequence[str]], **how: Any) -> Iterator[ClusterRun]:
    """A run on one broker and `hosts`, that has written batches."""
    try:
        with Network(("k1", *hosts)) as network:
            made = ClusterRun(network, folder, f"{run}-{os.getpid()}", ("k1",), hosts, **how)
            try:
                made.start()
                yield made
            finally:
                made.stop()
    except NoNetwork as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollout_joins_again_after_a_long_isolation(tmp_path: Path) -> None:
    with started(tmp_path, "isolated", BESIDE, changes=AWAY) as run:
        per_process = run.config.rollout.replicas

        def leases(process: int) -> dict[int, str]:
            """The trajectories of the assignments to a rollout process, by lease."""
            rows = (
                row for _, _, row in run.log.rows("inbox", "Assignment") if row["replica"] // per_process == process
            )
            return {row["lease"]: f"{row['prompt.purpose']} {row['prompt.number']}.{row['member']}" for row in rows}

        def finished() -> set[int]:
            """The leases under which rollout 0 has finished trajectories."""
            rows = (row for _, _, row in run.log.rows("trajectories", "Trajectory"))
            return {row["lease"] for row in rows if row["replica"] // per_process == 0}

        run.until(lambda: bool(finished()) and leases(0).keys() > finished(), "unfinished work of rollout 0")
        before, newest = run.batches(), max({**leases(0), **leases(1)})
        isolated = run.nemesis(1).inject("isolation", "r2", AWAY_S)
        meanwhile, had = run.batches(), set(leases(0).values())
        moved = {name for lease, name in leases(1).items() if lease > newest and name in had}
        assert isolated.seconds > AWAY_S
        assert meanwhile > before + 2  # the run has gone on
        assert moved  # with the trajectories of the isolated host
        last = max(leases(0))
        run.until(lambda: max(finished()) > last, "trajectories assigned after the isolation and finished there")
        survived = run.end([isolated])
        assert survived.anomalies == []
        assert survived.trained > 0
        assert run.audit().passed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ahead", ["r1", "r2"])
def test_run_survives_clocks_that_are_minutes_apart(tmp_path: Path, ahead: str) -> None:
    """One host of roles is ten minutes ahead of the broker, and the other ten minutes behind it."""
    clocks = {host: CLOCK_S if host == ahead else -CLOCK_S for host in ROLES}
    with started(tmp_path, "clocks", ROLES, clocks=clocks) as run:
        survived = run.end()
        assigned = max(row["assigned_at"] for _, _, row in run.log.rows("inbox", "Assignment"))  # on r1
        finished = max(row["finished_at"] for _, _, row in run.log.rows("trajectories", "Trajectory"))  # on r2
        assert abs((assigned - finished) / 1000 - (clocks["r1"] - clocks["r2"])) < CLOCK_S  # they are apart
        assert survived.anomalies == []
        assert survived.restarts == 0
        assert survived.trained > 0
        assert run.audit().passed
