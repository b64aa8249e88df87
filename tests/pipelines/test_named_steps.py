"""Every pipeline names the phases of its fold: those that the code measures, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIPELINES = ("prompts", "placement", "rollout", "score", "experience", "trainer", "evaluation", "relay")
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


@pytest.mark.parametrize("pipeline", [*PIPELINES, *OTHERS])
def test_pipeline_file_is_at_most_70_lines(pipeline: str) -> None:
    assert len((ROOT / "pipelines" / f"{pipeline}.py").read_text().splitlines()) <= 70
