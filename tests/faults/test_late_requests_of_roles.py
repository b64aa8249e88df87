"""A late EndTxn in every role of a run: by the log files, no record is lost, torn or written twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.late_run import TRIES_IN_TESTS, late_requests_in_every_role
from faults.proxied_broker import ProxiedBroker

ROLES = {
    *("autoscaler", "prompts", "placement", "agents-0", "gateway-0", "rollout-0", "score"),
    *("experience", "experience-1", "trainer", "evaluation", "relay-0"),
}
FENCED = "90"
"""PRODUCER_FENCED: the client's session has ended, and a new one has another epoch."""


@pytest.mark.timeout(900)
def test_roles_lose_nothing_by_late_requests(proxied: ProxiedBroker, run_id: str, tmp_path: Path) -> None:
    found = late_requests_in_every_role(proxied, run_id, tmp_path, TRIES_IN_TESTS)
    assert (found.anomalies, found.stalled) == ([], "")
    assert found.tries == dict.fromkeys(ROLES, TRIES_IN_TESTS)
    assert set(found.answers) == {FENCED}, "a request under the present epoch may end another transaction"
