"""The log of a run that has ended, which outlives its broker."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.reading import read_topic
from schemas.topics import Topic

R = TypeVar("R")


def read_ended(folder: Path, run: str, topic: Topic, kind: type[R]) -> list[R]:
    """All records of class `kind` in `topic` of `run`, whose folder is `folder`."""
    with start_broker(BrokerConfig(folder / "kafka")) as broker:
        records = read_topic(ClientProperties.at(broker.bootstrap_servers), topic.name(run))
        return [row for record in records for row in record.rows if isinstance(row, kind)]
