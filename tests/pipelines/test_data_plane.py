"""Several shards of a role, and several roles, as one graph for a runner that places them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.pipeline import AppliedPTransform
from unrun_pipelines import unrun_pipeline

from infra.deploy.config import DeployConfig
from infra.deploy.kubernetes.pods import submitter_pod
from infra.deploy.plan import DeploymentPlan
from infra.runners import run
from infra.runners.flink_slots import default_key_groups, subtask_of
from infra.runners.options import RunnerName
from operators.io.read_branches import ReadBranches
from operators.io.read_topics import sources_of
from pipelines.config import Config, parse_config
from pipelines.roles import ALL_SHARDS, DATA_PLANE, flink_options, graph_of, job_name, run_process, submitted_process

PARTITIONS = 4


def config_of(shards: int, emulated: bool = True) -> Config:
    table: dict[str, object] = {
        "run": {"name": "first"},
        "kafka": {"bootstrap_servers": "localhost:1", "partitions": PARTITIONS},
        "score": {"shards": shards},
        "experience": {"shards": shards},
        "prompts": {"source": "synthetic"},
        "rollout": {"engine": "emulated" if emulated else "transformers"},
    }
    return parse_config(table, "a test")


def built(config: Config, name: str, runner: RunnerName, *options: str) -> beam.Pipeline:
    """The graph of what `laminar submit` runs, not run."""
    pipeline = unrun_pipeline(f"--runner={runner}", *options)
    process = submitted_process(config, name, 0 if name == DATA_PLANE else ALL_SHARDS)
    graph_of(config, process, "embedded" if runner == "FnApiRunner" else "flink")(pipeline)  # type: ignore[comparison-overlap]
    return pipeline


def parts_of(graph: beam.Pipeline, kind: type[beam.PTransform]) -> list[AppliedPTransform]:
    """The parts of `graph` whose transform is of `kind`."""

    def below(part: AppliedPTransform) -> Iterator[AppliedPTransform]:
        if isinstance(part.transform, kind):
            yield part
        for each in part.parts:
            yield from below(each)

    return list(below(graph.transforms_stack[0]))


def test_data_plane_has_every_role_that_needs_no_machine() -> None:
    roles = {role.pipeline: role.index for role in submitted_process(config_of(2, emulated=False), DATA_PLANE).roles}
    expected = {"prompts": 0, "placement": 0, "score": ALL_SHARDS, "experience": ALL_SHARDS, "evaluation": 0}
    assert roles == expected
    assert "evaluation" not in {role.pipeline for role in submitted_process(config_of(2), DATA_PLANE).roles}


@pytest.mark.parametrize("role", ["score", "experience"])
def test_shards_of_a_role_share_its_partitions(role: str) -> None:
    (source,) = sources_of(built(config_of(3), role, "FlinkRunner").transforms_stack[0])  # type: ignore[arg-type]
    owned = [shard.inputs[0].partitions for shard in source.shards]
    assert owned == [(0, 3), (1,), (2,)]
    assert [shard.shard for shard in source.shards] == [0, 1, 2]


@pytest.mark.parametrize(
    ("shards", "slots", "subtasks"), [(2, 3, [0, 1, 2, 0, 1, 2]), (1, 3, [0, 1, 2, 0]), (1, 4, [0, 1, 2, 3])]
)
def test_data_plane_spreads_its_shards_over_all_subtasks(shards: int, slots: int, subtasks: list[int]) -> None:
    """With as many subtasks as slots, as the Deployment of a data plane sets, also more than a role has shards."""
    pod = submitter_pod(DeploymentPlan("first", "", (), DeployConfig(flink_slots=slots)), "flink:8081")
    words = pod["spec"]["containers"][0]["command"]
    graph = built(config_of(shards), DATA_PLANE, "FlinkRunner", *words[words.index("--") + 1 :])  # type: ignore[arg-type]
    assert [len(source.shards) for source in sources_of(graph.transforms_stack[0])] == [1, 1, shards, shards]
    keys = [key for part in parts_of(graph, beam.Create) for key in part.transform.values]
    assert [subtask_of(key, slots, default_key_groups(slots)) for key in keys] == subtasks


def test_portable_runner_gets_a_reshuffle_of_the_shards() -> None:
    graph = built(config_of(3), "score", "PortableRunner")  # type: ignore[arg-type]
    (shards,) = parts_of(graph, beam.Create)
    assert len(shards.transform.values) == 3
    (reshuffle,) = parts_of(graph, beam.Reshuffle)
    assert reshuffle.full_label.startswith(shards.full_label)
    (poll,) = (part for part in parts_of(graph, beam.ParDo) if part.full_label.endswith("/poll"))
    assert poll.inputs == tuple(shards.outputs.values())
    assert not parts_of(built(config_of(3), "score", "FlinkRunner"), beam.Reshuffle)  # type: ignore[arg-type]


def test_embedded_runner_reads_all_shards_by_one_source() -> None:
    graph = built(config_of(2), "score", "FnApiRunner")  # type: ignore[arg-type]
    (source,) = sources_of(graph.transforms_stack[0])
    reading = [part.transform for part in graph.transforms_stack[0].parts[0].parts]
    assert [type(each) for each in reading][:1] == [ReadBranches]
    assert len(source.shards) == 2


def test_flink_options_follow_the_number_of_shards() -> None:
    config = config_of(3)
    options = flink_options(config, submitted_process(config, DATA_PLANE))
    assert options == ["--parallelism=3", "--number_of_execution_retries=24"]
    assert flink_options(config, submitted_process(config, "score", 1)) == []
    assert flink_options(config, submitted_process(config, "prompts")) == []


def test_job_has_a_name_that_its_next_submission_has_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(run, "run_pipeline", lambda build, runner, options, close: given.append(options[0]))
    config = config_of(2)
    elsewhere = replace(config, kafka=replace(config.kafka, bootstrap_servers="elsewhere:9092"))
    for each, name in [(config, DATA_PLANE), (config, DATA_PLANE), (config, "prompts"), (elsewhere, "prompts")]:
        run_process(each, submitted_process(each, name), "flink")
    first, again, other, other_kafka = given
    assert first == again
    assert first.startswith(f"--job_name=laminar-{config.run.name}-data-plane-")
    assert len({first, other, other_kafka}) == 3, "another run of this name, at another Kafka, is not cancelled"


def test_job_name_needs_the_properties_of_its_roles_alone(tmp_path: Path) -> None:
    """The pod of a submission has the Secrets of its roles, and not that of the commands."""
    config = config_of(2)
    config = replace(config, kafka=replace(config.kafka, client_properties=f"{tmp_path}/{{role}}.properties"))
    (tmp_path / "prompts.properties").write_text("bootstrap.servers=localhost:1\n")
    assert job_name(config, submitted_process(config, DATA_PLANE)).startswith("laminar-first-data-plane-")
