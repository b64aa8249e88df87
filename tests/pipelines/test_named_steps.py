"""Every pipeline names its steps and the phases of its fold: those that the code measures. Every step has its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.runners.step_metrics import TIME, WAITING
from pipelines.present.view.metric_texts import TEXTS

ROOT = Path(__file__).parents[2]
PIPELINES = (
    "prompts",
    "placement",
    "agents",
    "gateway",
    "rollout",
    "score",
    "experience",
    "trainer",
    "evaluation",
    "relay",
    "autoscaler",
)
OTHERS = ("export", "imports")


def measured(folder: str, files: str = "*.py") -> set[str]:
    """The phases that the code of an operator measures."""
    texts = [file.read_text() for file in (ROOT / "operators" / folder).glob(files)]
    return {name for text in texts for name in re.findall(r'phase\("([^"]+)"\)', text)}


def named(pipeline: str) -> set[str]:
    """The phases that a pipeline names."""
    text = (ROOT / "pipelines" / f"{pipeline}.py").read_text()
    (arguments,) = re.findall(r"FoldRecords\((.+)\)\n", text)
    return set(re.findall(r'"([^"]+)"', arguments))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_names_the_phases_of_its_fold(pipeline: str) -> None:
    assert named(pipeline) == measured(pipeline) != set()


def test_export_and_import_name_the_phases_of_their_folds() -> None:
    assert named("export") == measured("export", "export_topic.py")
    assert named("imports") == measured("export", "import_rows.py")


def test_document_lists_the_metrics_of_beam() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    table = text.partition("| step | metrics |\n")[2].partition("\n\n")[0]
    listed = [name.partition("/")[0] for row in table.splitlines()[1:] for name in re.findall(r"`([a-z_/A-Z]+)`", row)]
    assert sorted(listed) == sorted([*TEXTS["steps"].keys() - {"time"}, TIME.rstrip("/"), WAITING])


@pytest.mark.parametrize("pipeline", [*PIPELINES, *OTHERS])
def test_pipeline_file_is_at_most_70_lines(pipeline: str) -> None:
    assert len((ROOT / "pipelines" / f"{pipeline}.py").read_text().splitlines()) <= 70


STEPS = ROOT / "tests" / "operators" / "steps"
ENDS = {"ReadTopics", "WriteTransactionally"}
"""The source and the sink, which tests/operators/io runs on a real broker."""


def steps(pipeline: str) -> list[tuple[str, str]]:
    """The named steps of a pipeline, and the class of each."""
    text = (ROOT / "pipelines" / f"{pipeline}.py").read_text()
    return re.findall(r'\| "([^"]+)"\s+>> (\w+)\(', text)


@pytest.mark.parametrize("pipeline", [*PIPELINES, *OTHERS])
def test_each_named_step_has_its_test_of_lists(pipeline: str) -> None:
    tests = "".join(file.read_text() for file in STEPS.glob("test_*.py"))
    found = steps(pipeline)
    assert [kind for _, kind in (found[0], found[-1])] == ["ReadTopics", "WriteTransactionally"]
    names = [re.sub(r"\W+", "_", name) for name, kind in found if kind not in ENDS]
    assert names
    assert [name for name in names if f"def test_{name}_" not in tests] == []


def test_tests_of_steps_are_at_most_60_lines_a_file() -> None:
    files = [*STEPS.glob("test_*.py"), *(ROOT / "tests" / "operators" / "io").glob("test_repartition*.py")]
    io = ("step_metrics", "counter_reports", "coalesce", "display_data")
    files += [ROOT / "tests" / "operators" / "io" / f"test_{name}.py" for name in io]
    files += (ROOT / "tests" / "operators" / "experience").glob("test_*pack*batches.py")
    assert {file.name: lines for file in files if (lines := len(file.read_text().splitlines())) > 60} == {}
