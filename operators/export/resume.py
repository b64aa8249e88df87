"""Where an export begins and goes on: what its folder says, held against what the topic still has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from operators.export.config import ExportConfig
from operators.export.folder import ExportError, next_offsets, read_contents, read_parts
from operators.io.elements import PartitionKey


@dataclass(frozen=True)
class Resume:
    """Says, at every start, from which offsets `config`'s export reads on."""

    config: ExportConfig
    client: ClientProperties

    def __call__(self) -> Mapping[PartitionKey, int]:
        """By partition; raises ExportError where the topic has not got what is to come next."""
        contents, folder = read_contents(self.config.folder), self.config.folder
        name = contents.of.name(contents.run)
        held = partition_ranges(self.client, name)
        following = next_offsets(contents, read_parts(folder))
        if held.keys() != following.keys():
            raise ExportError(f"{folder} is an export of {len(following)} partitions, but {name} has {len(held)}")
        for partition, offset in following.items():
            if offset < held[partition].beginning:
                raise ExportError(
                    f"{name}, partition {partition}: offsets {offset} to {held[partition].beginning - 1} were deleted "
                    f"before {folder} had them; begin another folder"
                )
            if offset > held[partition].end:
                raise ExportError(
                    f"{name}, partition {partition} ends at {held[partition].end}, but {folder} holds it up to "
                    f"{offset}: it was deleted and made anew, or is another Kafka's"
                )
        return {PartitionKey(contents.topic, partition): offset for partition, offset in following.items()}
