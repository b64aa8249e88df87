"""Three brokers and roles on separate hosts, under partitions, pauses and kills: no anomaly in any log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults.cluster_run import survive
from faults.network import NoNetwork

FAULTS = (
    *(("partition", "k2"), ("kill", "k3"), ("pause", "r1"), ("kill", "r2")),
    *(
        ("one-way partition", "k1"),
        ("delay", "r2"),
        ("loss", "r1"),
        ("bandwidth", "k3"),
        ("pause", "k1"),
        ("kill", "r1"),
    ),
)
"""Each kind, and the death of each host of roles; `tests/soak/fault_campaign.py` draws more than a hundred."""


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
