"""A run or a role survives a connection that is reset during its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.proxied_broker import ProxiedBroker
from faults.request_faults import LostRequest, LostResponse, Match

from operators.io.config import ShardConfig, TopicInput
from operators.io.source import ShardSource
from pipelines.config import load_config
from pipelines.run.topics import make_topics
from schemas.topics import METRICS

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain_sum.toml"
CREATE_TOPICS, DESCRIBE_CLUSTER = 19, 60


@pytest.fixture
def cleared(proxied: ProxiedBroker) -> Iterator[ProxiedBroker]:
    """No fault is left for other tests."""
    yield proxied
    proxied.proxy.clear()


@pytest.mark.parametrize("fault", [LostRequest, LostResponse])
def test_start_survives_resets(
    fault: type[LostRequest] | type[LostResponse], cleared: ProxiedBroker, run_id: str
) -> None:
    address = cleared.proxied.bootstrap_servers
    lost = cleared.proxy.add(fault(Match([CREATE_TOPICS]), 2))
    make_topics(load_config(EXAMPLE, [f"run.name={run_id}", f"kafka.bootstrap_servers={address}"]))
    assert lost.hits >= 1  # topics may have been made although their response is lost
    lost = cleared.proxy.add(fault(Match([DESCRIBE_CLUSTER]), 2))
    source = ShardSource(ShardConfig(cleared.proxied, run_id, "reset", inputs=(TopicInput(METRICS),)))
    try:
        assert source.next(wait=False).start == 1
    finally:
        source.close()
    assert lost.hits == 2
