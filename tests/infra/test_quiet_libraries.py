"""Lines of libraries that are dropped."""

from __future__ import annotations

import logging

import pytest

from infra.quiet_libraries import quiet_libraries


def test_quiet_libraries_drop_kafka_pythons_notes_of_slow_polls(caplog: pytest.LogCaptureFixture) -> None:
    selector = logging.getLogger("kafka.net.selector")
    filters = list(selector.filters)
    quiet_libraries()
    try:
        selector.warning("Task %r ran for %.3fs (>%.3fs threshold)", "poll", 0.155, 0.1)
        selector.warning("the connection is lost")
    finally:
        selector.filters = filters
    assert caplog.messages == ["the connection is lost"]
