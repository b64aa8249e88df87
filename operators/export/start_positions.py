"""The offsets at which an export starts or continues: those after its folder's, checked against the topic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from operators.export.config import ExportConfig
from operators.export.folder import ExportError, next_offsets, read_contents, read_parts
from operators.io.elements import PartitionKey


@dataclass(frozen=True)
class StartPositions:
    """Returns, at every start, the offsets from which the export of `config` reads."""

    config: ExportConfig
    client: ClientProperties

    def __call__(self) -> Mapping[PartitionKey, int]:
        """By partition: the next offset to export. Raises ExportError if the topic does not have it."""
        contents, folder = read_contents(self.config.folder), self.config.folder
        name = contents.source.name(contents.run)
        held = partition_ranges(self.client, name)
        following = next_offsets(contents, read_parts(folder))
        if held.keys() != following.keys():
            raise ExportError(f"{folder} is an export of {len(following)} partitions, but {name} has {len(held)}")
        for partition, offset in following.items():
            if offset < held[partition].beginning:
                raise ExportError(
                    f"{name}, partition {partition}: offsets {offset} to {held[partition].beginning - 1} were deleted "
                    f"before they were exported to {folder}; export to another folder"
                )
            if offset > held[partition].end:
                raise ExportError(
                    f"{name}, partition {partition} ends at {held[partition].end}, but {folder} has it up to "
                    f"{offset}: the topic was deleted and created again, or this is another Kafka"
                )
        return {PartitionKey(contents.topic, partition): offset for partition, offset in following.items()}
