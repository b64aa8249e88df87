"""Fixtures: the command line on a real broker, and a run's topics. Fixtures import modules that import kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from infra.kafka.broker import Broker

if TYPE_CHECKING:
    from exported_topics import Topics


@pytest.fixture
def topics(broker: Broker, run_id: str) -> Iterator[Topics]:
    from exported_topics import Topics

    created = Topics(broker, run_id)
    yield created
    created.close()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call `laminar` with arguments; return exit code, stdout and stderr."""
    from pipelines.cli.main import main

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture
def laminar(broker: Broker, command: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return lambda *words: command(*words, "-b", broker.bootstrap_servers)
