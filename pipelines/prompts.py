"""prompts: draws prompts from a dataset, a bounded number ahead of placement."""

from __future__ import annotations

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.prompts.draw_prompts import DrawPrompts
from operators.prompts.rendering import check_template
from pipelines.config import Config
from pipelines.shards import shard_config, topic_input
from schemas.topics import CURRICULUM, LEVEL_REQUEST, PROMPTS


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Reads the dataset, produces prompts. With a curriculum, consumes level requests and produces level replies."""
    level_requests = [topic_input(config, CURRICULUM, keys=(LEVEL_REQUEST,))] if config.prompts.curricula else []
    owned = ((PROMPTS, (0,)),)
    source = shard_config(config, "prompts", *level_requests, owned=owned, slow_poll=True, slow_commit=True)
    model = None if config.prompts.mixture[0].source == "synthetic" else config.model_folder()
    if model is not None and any(task.chat_template for task in config.prompts.mixture):
        from infra.models.checkpoint_folder import load_tokenizer  # deferred: imports torch

        tokenizer = load_tokenizer(model)
        for task in config.prompts.mixture:
            check_template(task, tokenizer)
    prompts, batch = config.prompts, config.experience.global_batch
    samples = min(task.samples_per_prompt for task in prompts.mixture)
    levels = bool(prompts.curricula)
    lead = config.placement.lead(batch, samples, levels=levels)
    slack = config.placement.lead_slack(lead, levels=levels)
    draw = DrawPrompts(prompts, source, model, config.context, lead, slack, config.plain_agents)
    (
        pipeline
        | "poll" >> ReadTopics(source)
        | "draw and render" >> FoldRecords(draw, "change levels", "draw questions", "render prompts")
        | "write prompts, dead letters" >> WriteTransactionally(source)
    )
