"""One small run's log on the broker, and the command line on it. Conftests are read before filters: imports wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from infra.kafka.broker import Broker
    from infra.kafka.properties import ClientProperties


@pytest.fixture(scope="session")
def story(broker: Broker) -> ClientProperties:
    """The run `a_run_to_read.RUN`."""
    from a_run_to_read import written

    return written(broker)


@pytest.fixture
def laminar(story: ClientProperties, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command on that run; gives its exit code, stdout and stderr."""
    from a_run_to_read import RUN

    from pipelines.cli.main import main

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--run", RUN, "-b", story.bootstrap_servers])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call
