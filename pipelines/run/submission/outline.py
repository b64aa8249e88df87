"""A pipeline as it would be submitted: what it reads, its steps, what it writes, its options, and what is missing."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.runners.options import Runner, option_names, pipeline_options
from pipelines.config import Config
from pipelines.roles import SHARDED, Role
from pipelines.run.preflight import missing_requirements
from pipelines.shards import partitions_of
from schemas.topics import CATALOGUE, Topic

EVERY = "every pipeline"
ANSWER_S = 3.0


@dataclass(frozen=True)
class TopicUse:
    """A topic of the run; `existing` partitions, None where it is not there, or nobody can tell."""

    name: str
    partitions: int
    existing: int | None = None


@dataclass(frozen=True)
class Outline:
    """What would run. `steps` are names and what each is; `missing` is empty where nothing is."""

    role: str
    run: str
    runner: Runner
    reads: tuple[TopicUse, ...]
    steps: tuple[tuple[str, str], ...]
    writes: tuple[TopicUse, ...]
    options: tuple[str, ...]
    missing: tuple[str, ...]


def outline(
    config: Config,
    role: Role,
    runner: Runner,
    beam_options: Sequence[str] = (),
    existing: Mapping[str, int] | None = None,
) -> Outline:
    """What submitting `role` would do. `existing` are the partitions of the topics that are there, None: not known."""
    options = pipeline_options(runner, beam_options)
    steps: tuple[tuple[str, str], ...] = ()
    missing = [*_lacking(config), *_runner_lacks(runner, options)]
    try:
        steps = steps_of(config, role) if config.run.name and _has_kafka(config) else ()
    except (ValueError, OSError) as error:
        missing += [] if str(error) in missing else [str(error)]

    def uses(chosen: Callable[[Topic], Sequence[str]]) -> tuple[TopicUse, ...]:
        mine = [topic for topic in CATALOGUE.values() if {role.pipeline, EVERY} & set(chosen(topic))]
        return tuple(_use(config, topic, existing or {}) for topic in mine) if config.run.name else ()

    reads, writes = uses(lambda topic: topic.consumers), uses(lambda topic: topic.producers)
    return Outline(role.name, config.run.name, runner, reads, steps, writes, tuple(options), tuple(missing))


def steps_of(config: Config, role: Role) -> tuple[tuple[str, str], ...]:
    """The steps of the graph of `role`, built and not run. Raises what keeps it from being built."""
    import apache_beam as beam

    pipeline = beam.Pipeline(runner="FnApiRunner")
    shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)  # Beam does in `run` alone
    where = {SHARDED[role.pipeline]: role.index} if role.pipeline in SHARDED else {}
    importlib.import_module(f"pipelines.{role.pipeline}").build(pipeline, config=config, **where)
    parts = pipeline.transforms_stack[0].parts
    return tuple((part.full_label, _what(part.transform)) for part in parts)


def _what(transform: Any) -> str:
    """The class of a transform, and of the step that it folds with."""
    step = getattr(transform, "_step", None)
    name = type(transform).__name__
    return name if step is None else f"{name}: {type(step).__name__}"


def _use(config: Config, topic: Topic, existing: Mapping[str, int]) -> TopicUse:
    name = topic.name(config.run.name)
    return TopicUse(name, len(partitions_of(config, topic)), existing.get(name))


def _lacking(config: Config) -> list[str]:
    found = [] if config.run.name else ["run.name is not set: which run's topics to read and write"]
    if not _has_kafka(config):
        found.append("kafka.bootstrap_servers is not set: name a broker, as `laminar broker start` prints it")
    return [*found, *missing_requirements(config, warm_start=False)]


def _has_kafka(config: Config) -> bool:
    return bool(config.kafka.bootstrap_servers or config.kafka.client_properties)


def _runner_lacks(runner: Runner, options: Sequence[str]) -> list[str]:
    named = option_names(options)
    if runner == "prism" and not {"job_endpoint", "prism_location"} & named:
        from infra.runners.prism import find_prism

        return [] if find_prism() else ["no Prism is found: `make prism`, or -- --prism_location=FILE"]
    if runner == "portable" and "job_endpoint" not in named:
        return ["no job server: -- --job_endpoint=HOST:PORT"]
    return []


def existing_topics(config: Config) -> tuple[dict[str, int], str | None]:
    """The partitions of the run's topics that are there, and why they cannot be told."""
    from infra.kafka.admin import admin_client, describe
    from infra.kafka.readiness import why_unreachable

    try:
        client = config.kafka.client()
        if (reason := why_unreachable(client.admin(), ANSWER_S)) is not None:
            return {}, f"Kafka does not answer: {reason}"
    except (ValueError, OSError) as error:
        return {}, f"kafka: {error}"
    names = [topic.name(config.run.name) for topic in CATALOGUE.values()]
    with admin_client(client) as admin:
        return {name: each.partitions for name, each in describe(admin, names).items()}, None
