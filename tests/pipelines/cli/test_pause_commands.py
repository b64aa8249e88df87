"""`laminar runs pause` and `unpause` on a real Kafka; the test writes what placement would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from role_writer import write_as_role

from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from pipelines.cli import pauses
from pipelines.cli.options import Address, RunClient
from pipelines.cli.pauses import pause_command, unpause_command
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.inspect.log.pauses import is_paused, newest_pause
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import Metric, Pause
from schemas.topics import CONTROL, METRICS, PAUSE, Topic


@pytest.fixture
def config(broker: Broker, run_id: str) -> Config:
    made = replace(parse_config({}, "a test"), run=RunConfig(run_id), kafka=KafkaConfig(broker.bootstrap_servers))
    make_topics(made)
    return made


@pytest.fixture
def address(config: Config) -> Address:
    return Address(config.kafka.bootstrap_servers, None, config.run.name)


def write(config: Config, topic: Topic, record: Any) -> None:
    value, headers = encode(record)
    with BoundedProducer(config.kafka.client()) as producer:
        producer.send(topic.name(config.run.name), value, key=b"pause", headers=headers, partition=0)


def answered_by_placement(config: Config, monkeypatch: pytest.MonkeyPatch, *running: int) -> None:
    """After each request, placement publishes a metric for each number of `running` trajectories."""
    written = pauses._write

    def write_and_answer(connection: RunClient, *request: Any) -> Pause:
        made = written(connection, *request)
        for count in running:
            values = {"paused": float(made.paused), "since": float(made.requested_at), "running": float(count)}
            metric = Metric(PAUSE, made.number, {**values, "waiting": 2.0}, 0)
            write_as_role(config.kafka.client(), config.run.name, METRICS, [metric])
        return made

    monkeypatch.setattr(pauses, "_write", write_and_answer)


def test_run_is_paused_and_continues(config: Config, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    client, run = config.kafka.client(), config.run.name
    answered_by_placement(config, monkeypatch, 4)
    assert not is_paused(client, run)
    report = pause_command(address, reason="new\x1b[2J switches")
    assert (report.exit_code, report.data["confirmed"], report.data["running"]) == (0, True, 4)
    assert "4 trajectories are running" in report.text()
    assert "2 more of a prompt that has begun wait" in report.text()
    paused = newest_pause(client, run)
    assert paused is not None
    assert (paused.number, paused.paused, paused.reason) == (1, True, "new\x1b[2J switches")
    assert "@" in paused.requested_by
    again = pause_command(address, reason="for no reason")
    assert (again.data["changed"], again.data["number"]) == (False, 1)
    assert f"by {paused.requested_by}" in again.text()
    assert is_paused(client, run)
    report = unpause_command(address)
    assert (report.data["number"], report.data["changed"]) == (2, True)
    assert report.text() == f"run {run} continues"
    assert not is_paused(client, run)
    report = unpause_command(address)
    assert (report.data["changed"], report.text()) == (False, f"run {run} is not paused")


def test_pause_waits_until_nothing_is_running(
    config: Config, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_by_placement(config, monkeypatch, 5, 2, 0)
    report = pause_command(address, wait=60.0)
    assert (report.exit_code, report.data["running"]) == (0, 0)


@pytest.mark.parametrize(("wait", "code"), [(0.001, 1), (0.0, 0)])
def test_pause_names_what_is_still_running(
    config: Config, address: Address, monkeypatch: pytest.MonkeyPatch, wait: float, code: int
) -> None:
    found = Metric(PAUSE, 1, {"paused": 1.0, "running": 5.0, "waiting": 0.0}, 0)
    monkeypatch.setattr(pauses, "_confirmation", lambda *_: found)
    report = pause_command(address, wait=wait)
    assert (report.exit_code, report.data["running"]) == (code, 5)
    assert ("5 trajectories are running still; they finish" in report.text()) == (code == 1)


class Answers:
    """An observer that returns one list of records per poll, then none."""

    def __init__(self, *polls: list[Any]) -> None:
        self._polls = list(polls)

    def poll(self, timeout_s: float) -> list[Any]:
        return self._polls.pop(0) if self._polls else []


def test_confirmation_is_the_newest_metric_about_the_request() -> None:
    request, other = Pause(2, True, "", "", 0), Metric("trainer", 7, {"loss": 1.0}, 0)
    earlier, first, last = (
        Metric(PAUSE, number, {"paused": 1.0, "running": float(running)}, 0)
        for number, running in ((1, 0), (2, 3), (2, 0))
    )
    polls = [earlier, other], [], [first, other], [last]
    assert pauses._confirmation(Answers(*polls), request, 60.0, 0.0) == first
    assert pauses._confirmation(Answers(*polls), request, 60.0, 60.0) == last
    assert pauses._confirmation(Answers([first]), request, 1e-6, 60.0) == first
    assert pauses._confirmation(Answers([first]), request, 0.0, 0.0) is None


def test_pause_reports_that_placement_has_not_confirmed(
    config: Config, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "CONFIRM_S", 0.1)
    report = pause_command(address)
    assert (report.exit_code, report.data["confirmed"]) == (0, False)
    assert "placement has not confirmed it within 0.1 s" in report.text()
    assert is_paused(config.kafka.client(), config.run.name)


def test_invalid_requests_are_ignored(config: Config) -> None:
    client, run = config.kafka.client(), config.run.name
    for each in (Pause(4, False, "", "", 0), Pause(-5, True, "", "", 0), Pause(9, True, "", "x" * 1001, 0)):
        write(config, CONTROL, each)
    assert newest_pause(client, run) == Pause(4, False, "", "", 0)


def test_run_of_an_earlier_release_is_not_paused(broker: Broker, run_id: str) -> None:
    address = Address(broker.bootstrap_servers, None, run_id)
    assert not is_paused(address.client(), run_id)
    with pytest.raises(RuntimeError, match="started by an earlier release; it gets the topic at its next start"):
        pause_command(address)
