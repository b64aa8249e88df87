"""Lines of libraries that are dropped."""

from __future__ import annotations

import logging

import pytest

from infra.quiet_libraries import quiet_libraries


def test_quiet_libraries_drop_kafka_pythons_lines(caplog: pytest.LogCaptureFixture) -> None:
    kafka = logging.getLogger("kafka")
    level = kafka.level
    quiet_libraries()
    try:
        logging.getLogger("kafka.net.selector").warning("Task %r ran for %.3fs (>%.3fs threshold)", "poll", 0.155, 0.1)
        logging.getLogger("kafka.cluster").error("Metadata refresh: failed Cancelled")
        logging.getLogger("pipelines").warning("the connection is lost")
    finally:
        kafka.setLevel(level)
    assert caplog.messages == ["the connection is lost"]
