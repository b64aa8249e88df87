"""`laminar submit --dry-run`: graph, topics and options of a pipeline, and what is missing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka.broker import Broker
from pipelines.cli.main import main
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.roles import DATA_PLANE, submitted_process
from pipelines.run.submission.drawing import svg, text
from pipelines.run.submission.outline import GraphStep, Outline, TopicUse, outline
from pipelines.run.topics import make_topics
from schemas.topics import BATCHES, CATALOGUE, CURRICULUM, EXPERIENCES, INBOX, PROMPTS, TRAJECTORIES

ROLES = ("placement", "score", "experience")
"""Pipelines whose graphs are built without a model."""

MAPS = {"placement": ["RepartitionTrajectories"], "experience": ["PackMicroBatches"]}
"""The stateless steps after the fold of each."""


def config(servers: str = "localhost:1", run: str = "first") -> Config:
    emulated = {"rollout": {"engine": "emulated"}, "prompts": {"source": "synthetic"}}
    return replace(parse_config(emulated, "a test"), run=RunConfig(run), kafka=KafkaConfig(servers))


@pytest.mark.parametrize("role", ROLES)
def test_outline_lists_topics_and_steps(role: str) -> None:
    found = outline(config(), submitted_process(config(), role), "embedded", ["--streaming"])
    assert found.missing == ()
    assert [use.name for use in found.reads] == [t.name("first") for t in CATALOGUE.values() if role in t.consumers]
    for topic in CATALOGUE.values():
        if role in topic.producers or "every pipeline" in topic.producers:
            assert topic.name("first") in [use.name for use in found.writes]
    kinds = [step.kind.partition(":")[0] for step in found.steps]
    assert kinds == ["ReadTopics", "FoldRecords", *MAPS.get(role, ()), "WriteTransactionally"]
    assert found.options == ("--runner=FnApiRunner", "--streaming")


@pytest.mark.parametrize(
    ("changes", "runner", "options", "reason"),
    [
        ({"run": RunConfig("")}, "embedded", (), "run.name is not set"),
        ({"kafka": KafkaConfig()}, "embedded", (), "kafka.bootstrap_servers is not set"),
        ({}, "portable", (), "--job_endpoint"),
        ({"model": "x"}, "embedded", (), "which has no model"),
        ({}, "portable", ("--job_endpoint=localhost:1",), ""),
        ({}, "flink", (), ""),
        ({}, "flink", ("--flink_version=1.20",), "--flink_version has no effect"),
        ({}, "prism", ("--prism_location=x",), ""),
    ],
)
def test_outline_lists_what_is_missing(changes: dict, runner: str, options: tuple[str, ...], reason: str) -> None:
    changed = config()
    if "model" in changes:
        changed = replace(changed, model=replace(changed.model, path=changes["model"]))
    else:
        changed = replace(changed, **changes)
    found = outline(changed, submitted_process(changed, "score"), runner, options)  # type: ignore[arg-type]
    assert [reason in each for each in found.missing] == ([True] if reason else [])


def test_drawing_is_valid_svg_with_all_elements() -> None:
    uses = (TopicUse("laminar.first.trajectories", 2, 2), TopicUse("laminar.first.<&>", 2))
    fold = GraphStep("place", "FoldRecords: Place", phases=("track", "dispatch"))
    steps = (GraphStep("read <it>", "ReadTopics"), fold, GraphStep("write", "RepartitionTrajectories", (), ("inbox",)))
    example = Outline("score", "first", "embedded", uses, steps, uses[:1], ("--x",), ("no model",))
    drawn = ElementTree.fromstring(svg(example))
    shapes = [each.tag.rpartition("}")[2] for each in drawn.iter()]
    assert shapes.count("rect") == 7
    assert sum("edge" in each.attrib.get("class", "") for each in drawn.iter()) == 5
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert {"read <it>", "· track", "· dispatch", "RepartitionTrajectories → inbox"} <= set(texts)
    assert "2 partitions, not created yet" in texts
    lines = text(example)
    for part in ("read <it>", "laminar.first.<&>", "--x", "no model", "· track", "2 partitions, not created yet"):
        assert part in lines


def test_submit_dry_run_exits_with_1_if_incomplete(
    broker: Broker, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.run.topics.ANSWER_S", 60.0)  # the machine may do other work
    file, drawing = tmp_path / "run.toml", tmp_path / "score.svg"
    file.write_text('rollout.engine = "emulated"\nprompts.source = "synthetic"\n')
    sets = ["--set", f"run.name={run_id}", "--set", f"kafka.bootstrap_servers={broker.bootstrap_servers}"]

    def dry_run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(["submit", "score", str(file), "--dry-run", *arguments])
        return int(exit_info.value.code or 0), capsys.readouterr().out

    code, out = dry_run(*sets, "--svg", str(drawing))
    assert code == 0
    assert "not created yet" in out
    assert "ScoreTrajectories" in out
    ElementTree.fromstring(drawing.read_text())
    make_topics(config(broker.bootstrap_servers, run_id))
    code, out = dry_run(*sets, "--json", "--", "--streaming")
    found = json.loads(out)
    assert {each["existing"] for each in found["reads"]} == {1}
    assert found["options"][-1] == "--streaming"
    code, out = dry_run("--set", f"run.name={run_id}", "--set", "kafka.bootstrap_servers=localhost:1")
    assert code == 1
    assert "Kafka does not answer" in out


def test_submit_dry_run_shows_the_whole_data_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No Flink and no Kafka has to answer; a Kafka that does not is named."""
    file, drawing = tmp_path / "run.toml", tmp_path / "data-plane.svg"
    file.write_text(
        'rollout.engine = "emulated"\nprompts.source = "synthetic"\nrun.name = "first"\n'
        'kafka = {bootstrap_servers = "localhost:1", partitions = 3}\nscore.shards = 3\nexperience.shards = 2\n'
    )
    on_flink = ("--runner", "flink", "--svg", str(drawing), "--json", "--", "--flink_master=nowhere:8081")
    with pytest.raises(SystemExit) as exit_info:
        main(["submit", DATA_PLANE, str(file), "--dry-run", *on_flink])
    found = json.loads(capsys.readouterr().out)
    (missing,) = found["missing"]
    assert "Kafka does not answer" in missing
    assert (exit_info.value.code, found["role"]) == (1, DATA_PLANE)
    folds = [step["kind"] for step in found["steps"] if step["kind"].startswith("FoldRecords: ")]
    steps = ("DrawPrompts", "PlaceTrajectories", "ScoreTrajectories", "MakeBatches")
    assert folds == [f"FoldRecords: {step}" for step in steps]
    assert [step["kind"] for step in found["steps"]].count("WriteTransactionally") == len(steps)
    read = {each["name"]: each["partitions"] for each in found["reads"]}
    assert read[TRAJECTORIES.name("first")] == 3
    assert {topic.name("first") for topic in (CURRICULUM, PROMPTS, TRAJECTORIES, EXPERIENCES)} <= read.keys()
    written = {each["name"] for each in found["writes"]}
    assert {topic.name("first") for topic in (PROMPTS, INBOX, EXPERIENCES, BATCHES)} <= written
    assert {"--parallelism=3", "--flink_master=nowhere:8081"} <= set(found["options"])
    texts = {each.text for each in ElementTree.fromstring(drawing.read_text()).iter() if each.tag.endswith("text")}
    assert {step["name"] for step in found["steps"]} <= texts


def test_submit_dry_run_needs_the_roles_properties_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the machine of a role the properties of the commands need not exist."""
    (tmp_path / "score.properties").write_text("bootstrap.servers=localhost:1\n")
    file = tmp_path / "run.toml"
    file.write_text(
        'rollout.engine = "emulated"\nprompts.source = "synthetic"\nrun.name = "first"\n'
        f'kafka.client_properties = "{tmp_path}/{{role}}.properties"\n'
    )
    with pytest.raises(SystemExit):
        main(["submit", "score", str(file), "--dry-run", "--json"])
    found = json.loads(capsys.readouterr().out)
    (missing,) = found["missing"]
    assert "Kafka does not answer" in missing
    assert [step["name"] for step in found["steps"]]
