"""The positions at which a start begins to read its inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kafka import TopicPartition

from infra.kafka.log_gaps import check_position
from infra.kafka.note import name_of
from infra.kafka.session_config import Input, Partition, SessionConfig

log = logging.getLogger(__name__)


class LostOffsets(NamedTuple):
    """Noted offsets before the begin of the log: of inputs that are `sought`, and of those read from their newest
    records on, which have `skipped` some."""

    sought: dict[Partition, int]
    skipped: dict[Partition, int]


def input_of_each(config: SessionConfig) -> list[tuple[TopicPartition, Input]]:
    """The partitions that a shard reads, each with its input."""
    return [(TopicPartition(i.topic, p), i) for i in config.inputs for p in i.partitions]


def seek_inputs(
    consumer: Any,
    config: SessionConfig,
    noted: Mapping[str, int],
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> LostOffsets:
    """Let `consumer` read each input from where its `Input` says: `noted` are the offsets in the last note.

    Returns the noted offsets that the log no longer has. Raises LogTruncated for those that the shard needs.
    """
    lost = LostOffsets({}, {})
    for tp, source in input_of_each(config):
        offset = noted.get(name_of(tp)) if source.start == "committed" else None
        newest = begins[tp] if source.newest is None else max(begins[tp], ends[tp] - source.newest)
        is_lost = offset is not None and offset < begins[tp]
        if offset is not None and not (is_lost and (source.sought or source.newest is not None)):
            check_position(config.group, tp, offset, begins[tp], ends[tp])
            consumer.seek(tp, offset)
        elif source.start == "latest":
            consumer.seek_to_end(tp)
        elif newest > begins[tp]:
            consumer.seek(tp, newest)
        else:
            consumer.seek_to_beginning(tp)
        if offset is None or not is_lost:
            continue
        if source.newest is None:
            lost.sought[Partition(*tp)] = offset
        else:
            lost.skipped[Partition(*tp)] = offset
            log.warning(
                "%s: offsets %d to %d of %s, partition %d, are skipped: the log begins at %d, and the newest suffice",
                *(config.group, offset, newest - 1, tp.topic, tp.partition, begins[tp]),
            )
    return lost
