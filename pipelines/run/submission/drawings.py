"""Generates the drawings of the documents: `python -m pipelines.run.submission.drawings docs/drawings`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.roles import ALL_PIPELINES, PIPELINES, Role, submitted_process
from pipelines.run.submission.cycle import cycle_svg
from pipelines.run.submission.drawing import svg
from pipelines.run.submission.outline import outline, steps_of
from pipelines.shards import partitions_of
from schemas.topics import CATALOGUE

_SETTINGS = {"rollout": {"engine": "emulated"}, "prompts": {"source": "synthetic"}, "relay": {"store": "/none"}}
"""An emulated run needs no model, and its graphs have the same steps."""


def drawings() -> Iterator[tuple[str, str]]:
    """File name and content of each drawing: one for each role, and `cycle.svg` of those that every run has."""
    config = example_config()
    topics = {topic.name(config.run.name): len(partitions_of(config, topic)) for topic in CATALOGUE.values()}
    for pipeline in ALL_PIPELINES:
        yield f"{pipeline}.svg", svg(outline(config, submitted_process(config, pipeline), "embedded", existing=topics))
    yield "cycle.svg", cycle_svg({pipeline: steps_of(config, Role(pipeline)) for pipeline in PIPELINES})


def example_config() -> Config:
    """The configuration of the drawings."""
    config = parse_config(_SETTINGS, "the drawings")
    return replace(config, run=RunConfig("run"), kafka=KafkaConfig("localhost:9092"))


def main() -> None:
    """Write every drawing to the folder in the first argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in drawings():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
