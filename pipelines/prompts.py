"""prompts: a dataset becomes prompts, a bounded lead ahead of placement."""

from __future__ import annotations

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.prompts.draw_prompts import DrawPrompts
from pipelines.config import Config
from pipelines.shards import reading, shard
from schemas.topics import ASKED, CURRICULUM, PROMPTS


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Dataset → prompts; with a curriculum, levels asked for → levels begun."""
    asked = [reading(config, CURRICULUM, keys=(ASKED,))] if config.prompts.levels else []
    source = shard(config, "prompts", *asked, anchor=PROMPTS, patient=True)
    model = None if config.prompts.source == "synthetic" else config.model_folder()
    draw = DrawPrompts(config.prompts, source, model, config.context, config.placement.prompt_lead)
    (
        pipeline
        | "tick" >> ReadTopics(source)
        | "draw prompts" >> FoldRecords(draw)
        | "write prompts" >> WriteTransactionally(source)
    )
