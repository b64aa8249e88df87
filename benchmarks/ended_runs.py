"""Reads the log of a finished run: the log outlives its broker."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_rows
from schemas.topics import Topic

R = TypeVar("R")


def rows_of(client: ClientProperties, topic: str, kind: type[R]) -> list[R]:
    """All records of class `kind` in `topic`."""
    return list(read_rows(client, topic, kind))


def read_ended(folder: Path, run: str, topic: Topic, kind: type[R]) -> list[R]:
    """All records of class `kind` in `topic` of `run`, whose folder is `folder`."""
    with start_broker(BrokerConfig(folder / "kafka")) as broker:
        return rows_of(ClientProperties.at(broker.bootstrap_servers), topic.name(run), kind)
