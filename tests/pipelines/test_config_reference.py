"""The configuration reference, read from the configuration classes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pipelines.config import Config, load_config, parse_config
from pipelines.config_reference import defaults_toml, json_schema, reference, sections, settings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


def test_reference_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "configuration.md"
    message = "out of date: run `python -m pipelines.config_reference > docs/configuration.md`"
    assert page.read_text(encoding="utf-8") == reference(), message


def test_defaults_toml_loads_as_the_default_configuration() -> None:
    table = tomllib.loads(defaults_toml())
    assert parse_config(table, "the defaults") == parse_config({}, "nothing")


@pytest.mark.parametrize(
    ("key", "kind", "default", "unit"),
    [
        ("placement.repack_s", "number", "5", "seconds"),
        ("placement.repack", "true or false", "unset", ""),
        ("kafka.partitions", "integer", "1", ""),
        ("run.folder", "path", '"runs"', ""),
        ("trainer.learner.betas", "list of number", "[0.9, 0.95]", ""),
        ("relay.max_megabytes_per_s", "number", "unset", "MB/s"),
        ("score.rewards[].name", "text", "", ""),
    ],
)
def test_setting_has_type_default_and_unit(key: str, kind: str, default: str, unit: str) -> None:
    found = settings()[key]
    assert (found.type, found.default, found.unit) == (kind, default, unit)


def test_sections_follow_the_file_order() -> None:
    keys = [section.key for section in sections()]
    assert keys[0] == "run"
    assert keys.index("trainer") < keys.index("trainer.learner") < keys.index("trainer.learner.algorithm")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_schema_knows_every_key_of_the_examples(file: Path) -> None:
    schema = json_schema()

    def check(value: object, node: dict, path: str) -> None:
        refs = [node, *node.get("anyOf", ())]
        node = next((schema["$defs"][each["$ref"].rpartition("/")[2]] for each in refs if "$ref" in each), node)
        if isinstance(value, dict) and "properties" in node:
            for name, item in value.items():
                assert name in node["properties"], f"{path}.{name}"
                check(item, node["properties"][name], f"{path}.{name}")
        elif isinstance(value, list) and isinstance(node.get("items"), dict):
            for item in value:
                check(item, node["items"], f"{path}[]")

    check(tomllib.loads(file.read_text(encoding="utf-8")), schema, file.name)
    assert isinstance(load_config(file), Config)


def test_every_key_has_a_meaning() -> None:
    assert not [key for key, setting in settings().items() if not setting.about]
