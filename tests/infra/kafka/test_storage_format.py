"""The format of a new broker's data folder is the one that Kafka's own tool writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from kafka.record.memory_records import MemoryRecords

from infra.kafka.broker import BrokerConfig, BrokerStartError, format_by_kafka, server_properties, start_broker
from infra.kafka.broker_jars import JARS
from infra.kafka.storage_format import BOOTSTRAP_CHECKPOINT, META_PROPERTIES, format_storage


def meta(log_dir: Path) -> dict[str, str]:
    lines = (log_dir / META_PROPERTIES).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def features(log_dir: Path) -> list[bytes]:
    """The records of the checkpoint, without its header and footer, which have a time."""
    records = MemoryRecords((log_dir / BOOTSTRAP_CHECKPOINT).read_bytes())
    found = []
    while (batch := records.next_batch()) is not None:
        found += [] if batch.is_control_batch else [record.value for record in batch]
    return found


def test_format_equals_that_of_kafkas_tool(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "log", tmp_path / "ours"
    settings = server_properties(BrokerConfig(tmp_path), 9092, 9093)
    properties = tmp_path / "server.properties"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    format_by_kafka(JARS.class_path(lambda line: None), properties, [])
    format_storage(ours, "1", meta(theirs)["cluster.id"])
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert features(ours) == features(theirs)
    assert len(features(ours)) >= 6
    ids = [meta(folder).pop("directory.id") for folder in (theirs, ours)]
    assert len(set(ids)) == 2
    assert {len(each) for each in ids} == {22}
    assert meta(theirs) | {"directory.id": ""} == meta(ours) | {"directory.id": ""}


def test_start_names_a_folder_that_cannot_be_formatted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file")
    with pytest.raises(BrokerStartError, match=f"cannot format {tmp_path / 'log'}: File exists"):
        start_broker(BrokerConfig(tmp_path))
