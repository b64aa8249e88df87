"""Display data: every runner's interface shows the groups, topics and functions of the named steps."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.transforms.display import DisplayData
from record_factories import CLIENT
from unrun_pipelines import unrun_pipeline

from operators.io.config import ShardConfig, TopicInput
from operators.io.elements import Restored, ShardFold
from operators.io.fold_records import FoldRecords
from operators.io.map_outputs import MapOutputs
from operators.io.read_topics import ReadTopics
from operators.io.repartition import RepartitionTrajectories
from operators.io.write_transactionally import WriteTransactionally
from schemas.topics import INBOX, RELAY


class _Step:
    def restore(self, restored: Restored) -> ShardFold:
        raise NotImplementedError


def shown(transform: beam.PTransform) -> dict[str, Any]:
    return {item.key: item.value for item in DisplayData.create_from(transform).items}


def test_source_and_sink_show_their_groups_and_topics() -> None:
    shard = ShardConfig(CLIENT, "r", "rollout", inputs=(TopicInput(INBOX), TopicInput(RELAY)))
    assert shown(ReadTopics(shard)) == {"groups": shard.group, "topics": "inbox, relay"}
    assert shown(WriteTransactionally(shard)) == {"transactional ids": shard.group}


def test_maps_show_their_function_and_topics() -> None:
    assert shown(RepartitionTrajectories()) == {"function": "repartition", "topics": "inbox"}
    assert shown(MapOutputs(len)) == {"function": "len"}  # type: ignore[arg-type]


def test_fold_shows_its_step_and_phases() -> None:
    pipeline = unrun_pipeline()
    pipeline | beam.Create([]) | "fold" >> FoldRecords(_Step(), "track trajectories", "dispatch")
    (fold,) = (part for part in pipeline.transforms_stack[0].parts if part.full_label == "fold")
    (leaf,) = fold.parts  # runners show the display data of the leaves of a graph
    assert shown(leaf.transform).items() >= {"step": "_Step", "phases": "track trajectories, dispatch"}.items()
