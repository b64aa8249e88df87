"""The processes of both layouts, and the graph of the roles that share one."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import fn_runner
from unrun_pipelines import unrun_pipeline

from operators.io.read_branches import ReadBranches
from pipelines.branches import build_branches, shards_of
from pipelines.config import Config, parse_config
from pipelines.roles import LIGHT, build_role, processes_of

ROLES = ["prompts", "placement", "rollout-0", "score", "experience", "trainer", "evaluation", "relay-0"]


def config_of(layout: str, **sections: dict[str, object]) -> Config:
    run: dict[str, object] = {"name": "first", "layout": layout}
    return parse_config({"run": run, "kafka": {"bootstrap_servers": "localhost:1"}, **sections}, "a test")


def layout_of(config: Config) -> dict[str, list[str]]:
    return {process.name: [role.name for role in process.roles] for process in processes_of(config)}


def test_isolated_layout_has_a_process_for_each_role() -> None:
    assert layout_of(config_of("isolated")) == {role: [role] for role in ROLES}


def test_compact_layout_has_one_process_for_roles_without_model() -> None:
    shards = {"experience": {"shards": 2}, "kafka": {"bootstrap_servers": "localhost:1", "partitions": 2}}
    assert layout_of(config_of("compact", rollout={"processes": 2}, **shards)) == {
        LIGHT: ["prompts", "placement", "score", "experience", "experience-1", "evaluation", "relay-0"],
        "rollout-0": ["rollout-0"],
        "rollout-1": ["rollout-1"],
        "trainer": ["trainer"],
    }


def test_score_with_slow_verifiers_has_its_own_process() -> None:
    score = {"rewards": [{"name": "exact"}, {"name": "my_rewards:judge"}]}
    assert layout_of(config_of("compact", score=score))["score"] == ["score"]
    assert "score" in layout_of(config_of("compact", score={"rewards": [{"name": "exact"}]}))[LIGHT]


@pytest.mark.parametrize(("cores", "expected"), [(1, True), (4, True), (5, False), (64, False)])
def test_auto_layout_depends_on_the_cores(cores: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert (LIGHT in layout_of(config_of("auto"))) == expected


@pytest.fixture
def compact(tmp_path: Path) -> tuple[Config, dict[str, partial[None]]]:
    """An emulated run, and the builds of its light roles."""
    settings = {"rollout": {"engine": "emulated"}, "prompts": {"source": "synthetic"}}
    config = config_of("compact", **settings, relay={"store": str(tmp_path)})  # type: ignore[arg-type]
    light = next(process for process in processes_of(config) if process.name == LIGHT)
    return config, {role.name: partial(build_role, config=config, role=role) for role in light.roles}


def test_branches_keep_the_shards_of_their_roles(compact: tuple[Config, dict[str, partial[None]]]) -> None:
    _, builds = compact
    pipeline = unrun_pipeline()
    build_branches(pipeline, builds)
    reading = pipeline.transforms_stack[0].parts[0].transform
    assert isinstance(reading, ReadBranches)
    found = [(each.branch, each.shard.pipeline) for each in reading.shards]
    assert found == [(name, name) for name in ("prompts", "placement", "score", "experience")]
    assert [each.shard for each in reading.shards] == [shard for build in builds.values() for shard in shards_of(build)]
    labels = [part.full_label for part in pipeline.transforms_stack[0].parts[1:]]
    assert labels == ["prompts", "placement", "score", "experience"]


def test_branches_are_one_stage_of_the_embedded_runner(
    compact: tuple[Config, dict[str, partial[None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second stage would wait for the end of the first, which is the end of the run."""
    _, builds = compact
    stages: list[set[str]] = []
    names = lambda stage: {part.unique_name for part in stage.transforms}  # noqa: E731
    monkeypatch.setattr(
        fn_runner.FnApiRunner, "run_stages", lambda runner, context, found: stages.extend(map(names, found))
    )
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
        build_branches(pipeline, builds)
        pipeline.run = lambda *_: _Ended(pipeline)  # type: ignore[method-assign]
    (stage,) = [names for names in stages if any("/write " in name for name in names)]
    assert {name.partition("/")[0] for name in stage} >= set(builds), stage


class _Ended:
    def __init__(self, pipeline: beam.Pipeline) -> None:
        self._pipeline = pipeline
        pipeline.runner.run_pipeline(pipeline, pipeline.options)

    def wait_until_finish(self) -> None:
        shutil.rmtree(self._pipeline.local_tempdir, ignore_errors=True)
