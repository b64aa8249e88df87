"""Lines of libraries that are dropped."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from kafka.future import Future

from infra.quiet_libraries import quiet_kafka, quiet_libraries


@pytest.fixture(autouse=True)
def restored_levels() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("kafka", "kafka.future", "kafka.net.selector")]
    levels = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


def test_quiet_libraries_drop_kafka_pythons_lines(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries()
    logging.getLogger("kafka.net.selector").warning("Task %r ran for %.3fs (>%.3fs threshold)", "poll", 0.155, 0.1)
    logging.getLogger("kafka.cluster").error("Metadata refresh: failed Cancelled")
    logging.getLogger("pipelines").warning("the connection is lost")
    assert caplog.messages == ["the connection is lost"]


def test_roles_log_what_kafka_python_catches(caplog: pytest.LogCaptureFixture) -> None:
    quiet_kafka(log_defects=True)

    def fail(value: object) -> None:
        raise KeyError(value)

    Future().add_callback(fail).success("lost")
    logging.getLogger("kafka.net.connection").error("Connection lost")
    assert caplog.messages == ["Error processing callback"]
    assert "KeyError: 'lost'" in caplog.text
