"""The drawings of the documents are those of the present graphs; the cycle has the topics of the catalogue."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pipelines.roles import PIPELINES, Role
from pipelines.run.submission.cycle import COLUMNS, EDGES
from pipelines.run.submission.drawings import drawings, example_config
from pipelines.run.submission.outline import EVERY_PIPELINE, steps_of
from schemas.topics import CATALOGUE

FOLDER = Path(__file__).parents[4] / "docs" / "drawings"


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return dict(drawings())


def test_documents_have_the_drawings_of_the_present_graphs(drawn: dict[str, str]) -> None:
    found = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.svg")}
    assert found == drawn, "out of date: `make generated`"


def test_cycle_has_every_role_with_its_steps(drawn: dict[str, str]) -> None:
    assert {role for column in COLUMNS for role in column if role} == set(PIPELINES)
    texts = {each.text for each in ElementTree.fromstring(drawn["cycle.svg"]).iter() if each.tag.endswith("text")}
    for role in PIPELINES:
        for step in steps_of(example_config(), Role(role)):
            assert {step.name, *step.phases} <= texts


@pytest.mark.parametrize(("source", "to"), list(EDGES))
def test_cycle_arrows_are_topics_of_the_catalogue(source: str, to: str) -> None:
    for name in EDGES[source, to]:
        assert source in CATALOGUE[name].producers
        assert to in CATALOGUE[name].consumers


def test_topics_of_a_map_are_written_by_its_role() -> None:
    for role in PIPELINES:
        for step in steps_of(example_config(), Role(role)):
            assert all({role, EVERY_PIPELINE} & set(CATALOGUE[topic].producers) for topic in step.topics)
