"""The outline of a submission: topics read, steps, topics written, options, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from infra.runners.options import FLINK_VERSION_UNUSED, RunnerName, option_names, pipeline_options
from pipelines.config import Config
from pipelines.inspect.run_folders import laminar_command
from pipelines.roles import Role, RoleProcess, flink_options, import_pipeline
from pipelines.run.preflight import missing_requirements
from pipelines.run.run_names import UNNAMED
from pipelines.shards import partitions_of
from schemas.topics import CATALOGUE, Topic

EVERY_PIPELINE = "every pipeline"


@dataclass(frozen=True)
class TopicUse:
    """A topic of the run; `existing`: its partitions, None if it does not exist or Kafka is unreachable."""

    name: str
    partitions: int
    existing: int | None = None


@dataclass(frozen=True)
class GraphStep:
    """A step of a graph and its class. A fold has `phases`; a map after it makes the records of `topics`."""

    name: str
    kind: str
    phases: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The class, and the topics if it is a map."""
        return f"{self.kind} → {', '.join(self.topics)}" if self.topics else self.kind


@dataclass(frozen=True)
class Outline:
    """What would run. `missing`: what prevents the submission."""

    role: str
    run: str
    runner: RunnerName
    reads: tuple[TopicUse, ...]
    steps: tuple[GraphStep, ...]
    writes: tuple[TopicUse, ...]
    options: tuple[str, ...]
    missing: tuple[str, ...]


def outline(
    config: Config,
    process: RoleProcess,
    runner: RunnerName,
    beam_options: Sequence[str] = (),
    existing: Mapping[str, int] | None = None,
) -> Outline:
    """What submitting `process` would run. `existing`: partition counts of existing topics, None: unknown."""
    chosen = [*(flink_options(config, process) if runner == "flink" else ()), *beam_options]
    options = pipeline_options(runner, chosen)
    steps: tuple[GraphStep, ...] = ()
    own = replace(config, kafka=config.kafka.for_role(process.roles[0].pipeline))
    missing = [*_missing_settings(own), *_missing_for_runner(runner, options)]
    try:
        if config.run.name and _has_kafka(config):
            steps = tuple(step for role in process.roles for step in steps_of(config, role))
    except (ValueError, OSError) as error:
        missing += [] if str(error) in missing else [str(error)]

    users = {EVERY_PIPELINE, *(role.pipeline for role in process.roles)}

    def uses(chosen: Callable[[Topic], Sequence[str]]) -> tuple[TopicUse, ...]:
        topics = [topic for topic in CATALOGUE.values() if users & set(chosen(topic))]
        return tuple(_use(config, topic, existing or {}) for topic in topics) if config.run.name else ()

    reads, writes = uses(lambda topic: topic.consumers), uses(lambda topic: topic.producers)
    return Outline(process.name, config.run.name, runner, reads, steps, writes, tuple(options), tuple(missing))


def steps_of(config: Config, role: Role) -> tuple[GraphStep, ...]:
    """The steps of the graph of `role`, built but not run. Raises the error of a failed build."""
    from pipelines.branches import built

    config = replace(config, kafka=config.kafka.for_role(role.pipeline))
    build = partial(import_pipeline(role).build, config=config, **role.build_arguments)
    return tuple(_graph_step(part) for part in built(build).parts)


def _graph_step(part: Any) -> GraphStep:
    from operators.io.fold_records import FoldRecords
    from operators.io.map_outputs import MapOutputs

    label, transform, name = part.full_label, part.transform, type(part.transform).__name__
    if isinstance(transform, FoldRecords):
        return GraphStep(label, f"{name}: {type(transform.step).__name__}", phases=transform.phases)
    if isinstance(transform, MapOutputs):
        return GraphStep(label, name, topics=tuple(topic.short_name for topic in transform.writes))
    return GraphStep(label, name)


def _use(config: Config, topic: Topic, existing: Mapping[str, int]) -> TopicUse:
    name = topic.name(config.run.name)
    return TopicUse(name, len(partitions_of(config, topic)), existing.get(name))


def _missing_settings(config: Config) -> list[str]:
    found = [] if config.run.name else [UNNAMED]
    if not _has_kafka(config):
        found.append(
            "kafka.bootstrap_servers is not set, which a pipeline of its own needs: "
            f"`{laminar_command()} broker start` prints the address of a new broker (`{laminar_command()} run` needs "
            "none, and checks a configuration for it with --check)"
        )
    return [*found, *missing_requirements(config, warm_start=False)]


def _has_kafka(config: Config) -> bool:
    return bool(config.kafka.bootstrap_servers or config.kafka.client_properties)


def _missing_for_runner(runner: RunnerName, options: Sequence[str]) -> list[str]:
    named = option_names(options)
    if runner == "prism" and not {"job_endpoint", "prism_location"} & named:
        from infra.runners.prism import find_prism

        return [] if find_prism() else ["Prism is not installed: run `make prism`, or pass -- --prism_location=FILE"]
    if runner == "flink" and "flink_version" in named:
        return [FLINK_VERSION_UNUSED]
    if runner == "portable" and "job_endpoint" not in named:
        return ["no job server is configured: pass -- --job_endpoint=HOST:PORT"]
    return []
