"""Fixtures: the log of the example run on the broker, and the command line on it. Imports are deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from infra.kafka.broker import Broker
    from infra.kafka.properties import ClientProperties


@pytest.fixture(scope="session")
def log_client(broker: Broker) -> ClientProperties:
    """Client properties of the run `example_log.RUN`."""
    from example_log import write_run

    return write_run(broker)


@pytest.fixture
def laminar(log_client: ClientProperties, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command on that run; returns its exit code, stdout and stderr."""
    from example_log import RUN

    from pipelines.cli.main import main

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main([*arguments, "--run", RUN, "-b", log_client.bootstrap_servers])
        printed = capsys.readouterr()
        return int(exit_info.value.code or 0), printed.out, printed.err

    return call
