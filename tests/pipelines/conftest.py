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
def laminar(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    from pipelines.cli.main import main

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main([*arguments, "-b", broker.bootstrap_servers])
        printed = capsys.readouterr()
        return int(exit_info.value.code or 0), printed.out, printed.err

    return call
