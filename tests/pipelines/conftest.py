"""The command line on a real broker, and topics to look at with it. What imports kafka is imported by the fixtures."""

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

    made = Topics(broker, run_id)
    yield made
    made.close()


@pytest.fixture
def laminar(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    from pipelines.cli.main import main

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "-b", broker.bootstrap_servers])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call
