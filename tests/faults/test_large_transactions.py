"""A large emission over a slow link is committed; a time-out that is too small is an error that names its setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from faults.proxied_broker import ProxiedBroker

from infra.kafka.admin import TopicSpec, admin_client, create_topics, end_offsets
from infra.kafka.session import Outgoing, Partition, Session, SessionLost
from infra.kafka.session_config import Input, SessionConfig

MIB = 1 << 20
BYTES_PER_S = MIB


@pytest.fixture
def config(proxied: ProxiedBroker, run_id: str) -> Iterator[SessionConfig]:
    short_names = {short_name: f"{run_id}-{short_name}" for short_name in ("in", "out", "restore")}
    with admin_client(proxied.direct) as admin:
        create_topics(
            admin, [TopicSpec(name, 1, config={"max.message.bytes": str(4 * MIB)}) for name in short_names.values()]
        )
    yield SessionConfig(
        proxied.proxied, run_id, (Input(short_names["in"], (0,)),), Partition(short_names["restore"], 0)
    )
    proxied.proxy.clear()


def outputs(config: SessionConfig, megabytes: int) -> list[Outgoing]:
    return [Outgoing(f"{config.group}-out", 0, None, bytes(MIB), []) for _ in range(megabytes)]


def test_session_commits_a_transaction_within_its_timeout(proxied: ProxiedBroker, config: SessionConfig) -> None:
    """1 GB at 20 MB/s takes 50 s of the default 60; here 12 MB at 1 MB/s take 12 s of 20."""
    session = Session(replace(config, transaction_timeout_s=20.0))
    proxied.proxy.throttle(BYTES_PER_S)
    try:
        assert session.commit(outputs(config, 12), {}, {}, {}) == {f"{config.group}-out:0": 0}
    finally:
        session.close()
    with admin_client(proxied.direct) as admin:
        ends = end_offsets(admin, [f"{config.group}-out"])
    assert list(ends.values()) == [13]  # and the marker


def test_session_names_the_setting_after_a_transaction_timeout(proxied: ProxiedBroker, config: SessionConfig) -> None:
    session = Session(replace(config, transaction_timeout_s=2.0))
    proxied.proxy.throttle(BYTES_PER_S)
    try:
        with pytest.raises(SessionLost, match=r"kafka\.transaction_timeout_s"):
            session.commit(outputs(config, 8), {}, {}, {})
    finally:
        session.close()
