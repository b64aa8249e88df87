"""A reader that stands still before the end of its log is noticed, and the producer that holds it back is named."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaTimeoutError
from shard_sessions import Open, feed, source

from infra.kafka import open_transactions as stalls
from infra.kafka.ledger_reader import read_committed
from infra.kafka.open_transactions import (
    REPORT_INTERVAL_S,
    STALLED_POLLS,
    STALLED_S,
    StallWatch,
    describe_blocking_transactions,
)
from infra.kafka.session_config import Partition, SessionConfig

HERE = Partition("t", 0)


@pytest.mark.parametrize(
    ("later_s", "position", "end", "stalled"),
    [
        (STALLED_S, 5, 9, True),
        (STALLED_S - 1, 5, 9, False),  # not yet
        (STALLED_S, 6, 9, False),  # it moves
        (STALLED_S, 5, 5, False),  # nothing more is written
        (STALLED_S, 5, None, False),  # the end is not known yet
    ],
)
def test_stall_watch_reports_reader_without_progress(
    later_s: float, position: int, end: int | None, stalled: bool
) -> None:
    now = [0.0]
    watch = StallWatch(lambda: now[0])
    assert watch.stalled({HERE: 5}, {HERE: 9}) == []
    now[0] = later_s
    found = [watch.stalled({HERE: position}, {HERE: end}) for _ in range(STALLED_POLLS)]
    assert found == [[]] * (STALLED_POLLS - 1) + [[HERE] if stalled else []]


def test_stall_watch_repeats_report_after_interval() -> None:
    now = [0.0]
    watch = StallWatch(lambda: now[0])
    reports = []
    for now[0] in (0.0, STALLED_S, STALLED_S + 1, STALLED_S + REPORT_INTERVAL_S):
        reports.append(sum(len(watch.stalled({HERE: 5}, {HERE: 9})) for _ in range(STALLED_POLLS)))
    assert reports == [0, 1, 0, 1]


@pytest.mark.parametrize("found", [["a transaction of other.0", "another"], []])
def test_ledger_behind_an_open_transaction_is_named(found: list[str]) -> None:
    consumer = SimpleNamespace(seek=lambda *_: None, poll=lambda timeout_ms: {})
    begins, ends = {}, {TopicPartition("settled", 0): 5, TopicPartition("settled", 1): 3}
    clock, blocking = count().__next__, {TopicPartition("settled", 0): found}
    reason = "; ".join(found) or "no transaction is open there now"
    with pytest.raises(KafkaTimeoutError, match=rf"\(settled:0 to 5\): {reason}"):
        read_committed(*(consumer, begins, ends, lambda place: 3, clock, 1.0, None), lambda places: blocking[places[0]])


def test_blocking_transaction_names_producer(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "STALLED_S", 0.0)
    with KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-dead")) as dead:
        dead.init_transactions()
        dead.begin_transaction()
        dead.send(source(config).topic, b"undecided").get(10)
        feed(config, b"after it")
        session, watch = opened(config), StallWatch()
        for _ in range(600):
            assert session.poll(0.1) == []
            if found := watch.stalled(session.positions(), session.high_watermarks()):
                break
        (line,) = describe_blocking_transactions(config.client, found)
        assert f"{source(config).topic}, partition 0: a transaction of {config.group}-dead (producer " in line
        assert "is open from offset 0 on" in line
        ((producer, servers),) = re.findall(r"`laminar topics transactions abort (\d+) -b (\S+) --execute`$", line)
        assert f"(producer {producer})" in line
        assert servers == config.client.bootstrap_servers
        dead.abort_transaction()
