"""A large emission over a slow link is committed; a time-out that is too small is an error that names its setting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from faults.proxied_broker import ProxiedBroker

from infra.kafka.admin import TopicSpec, admin_client, create_topics, end_offsets
from infra.kafka.open_transactions import open_transactions
from infra.kafka.session import Outgoing, Partition, Session, SessionLost
from infra.kafka.session_config import Input, SessionConfig
from infra.kafka.sessions import SESSIONS
from infra.kafka.transactions import TransactionalProducer
from operators.io.commits import MAX_TRANSACTION_BYTES
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Emission, Output
from operators.io.sink import ShardSink
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS, RESTORE

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


def opened_in_time(config: SessionConfig) -> Session:
    """A session of `config`, whose time-out is so short that a start may exceed it, too."""
    while True:
        try:
            return Session(config)
        except SessionLost:
            continue


def outputs(config: SessionConfig, megabytes: int) -> list[Outgoing]:
    return [Outgoing(f"{config.group}-out", 0, None, bytes(MIB), []) for _ in range(megabytes)]


@pytest.mark.slow
def test_sink_commits_an_emission_larger_than_the_bound(proxied: ProxiedBroker, run_id: str) -> None:
    """1 GB at 20 MB/s takes 50 s of the default time-out of 60 s; so do 42 MB at 0.84 MB/s."""
    records, size, timeout_s = 42, 1_000_000, 60.0
    assert records * size > MAX_TRANSACTION_BYTES
    config = ShardConfig(proxied.proxied, run_id, "score", transaction_timeout_s=timeout_s)
    topic = DEAD_LETTERS.name(run_id)
    with admin_client(proxied.direct) as admin:
        settings = {"max.message.bytes": str(8 * MIB)}
        create_topics(admin, [TopicSpec(name, 1, config=settings) for name in (topic, RESTORE.name(run_id))])
    letters = [DeadLetter("score", "large", "trajectories", 0, number, bytes(size), 0) for number in range(records)]
    outputs = tuple(Output(DEAD_LETTERS, str(letter.offset), letter) for letter in letters)
    session, sink = SESSIONS.open(config.session()), ShardSink(config)
    proxied.proxy.throttle(records * size / (50 / 60 * timeout_s))
    link, began = proxied.proxy.upstream_pace, time.monotonic()
    try:
        sink.write(Emission(config.group, session.start, 1, outputs, Checkpoint()))
        sink.flush()
        assert (session.lost, session.commits) == (None, 2)  # the first one is that of the start
        assert link.bytes > records * size
        assert time.monotonic() - began > 0.8 * timeout_s
    finally:
        proxied.proxy.clear()
        sink.close()
        SESSIONS.close(config.group)
    with admin_client(proxied.direct) as admin:
        assert list(end_offsets(admin, [topic]).values()) == [records + 1]  # and the marker


def test_own_time_out_of_a_transaction_names_the_setting() -> None:
    error = TransactionalProducer._too_slow(SimpleNamespace(_bound_s=5.0))  # type: ignore[arg-type]
    assert "the transaction did not end within 5 s; " in str(error)
    assert str(error).endswith("raise kafka.transaction_timeout_s")


def test_session_names_the_setting_after_a_transaction_timeout(proxied: ProxiedBroker, config: SessionConfig) -> None:
    """The session's own time-out, or on a busy machine the brokers' abort, which ends the producer's epoch."""
    session = opened_in_time(replace(config, transaction_timeout_s=5.0))
    proxied.proxy.throttle(BYTES_PER_S)
    try:
        with pytest.raises(SessionLost, match=r"kafka\.transaction_timeout_s"):
            session.commit(outputs(config, 8), {}, {}, {})
    finally:
        session.close()
    sender = session._producer._sender
    sender.join(30)
    assert not sender.is_alive(), "each lost session would leave a thread and its records"


def test_session_names_the_setting_after_an_abort_by_the_brokers(config: SessionConfig, proxied: ProxiedBroker) -> None:
    """As of a process that has not run for a while, whose own time-out is later than theirs."""
    session = opened_in_time(replace(config, client=proxied.direct, transaction_timeout_s=1.0))
    session._producer._bound_s = 60.0
    flush = session._producer.flush

    def flush_and_wait_for_the_abort(timeout: float | None = None) -> None:
        flush(timeout)
        with admin_client(proxied.direct) as admin:
            while open_transactions(admin, [f"{config.group}-out"]):
                time.sleep(0.1)

    session._producer.flush = flush_and_wait_for_the_abort
    with pytest.raises(SessionLost, match=r"kafka\.transaction_timeout_s"):
        session.commit(outputs(config, 1), {}, {}, {})
    session.close()
