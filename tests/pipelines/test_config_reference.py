"""The configuration reference, read from the configuration classes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipelines.config import Config, load_config, parse_config
from pipelines.config_reference import KEY_UNITS, defaults_toml, json_schema, reference, sections, settings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


def test_reference_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "configuration.md"
    message = "out of date: `make generated`"
    assert page.read_text(encoding="utf-8") == reference(), message


def test_defaults_toml_loads_as_the_default_configuration() -> None:
    table = tomllib.loads(defaults_toml())
    assert parse_config(table, "the defaults") == parse_config({}, "nothing")


@pytest.mark.parametrize(
    ("key", "kind", "default", "unit"),
    [
        ("placement.repack_s", "number, positive", "5", "seconds"),
        ("placement.repack", "true or false", "unset", ""),
        ("kafka.partitions", "integer, at least 1", "1", ""),
        ("run.folder", "path", '"runs"', ""),
        ("trainer.learner.betas", "list of number, at least 0 and below 1", "[0.9, 0.95]", ""),
        ("relay.max_megabytes_per_s", "number, positive", "unset", "MB/s"),
        ("score.rewards[].name", "text", "", ""),
        ("trainer.optimizer_steps", "integer, at least 1", "80", "batches"),
        ("trainer.learner.mini_batches", "integer, at least 1", "unset", "optimizer steps"),
        ("rollout.environments[].memory_mb", "integer, at least 1", "1024", "MiB"),
        ("rollout.context", "integer", "unset", "tokens"),
        ("run.time_scale", "number, positive and finite", "1", ""),
        ("deploy.memory_gib", "table of integer, at least 1", "{}", "GiB"),
        ("rollout.vllm", "table", "{}", ""),
    ],
)
def test_setting_has_type_default_and_unit(key: str, kind: str, default: str, unit: str) -> None:
    found = settings()[key]
    assert (found.type, found.default, found.unit) == (kind, default, unit)


def test_data_type_is_unset_where_the_device_decides_it() -> None:
    assert settings()["rollout.dtype"].default == "unset"


@pytest.mark.parametrize("example", [*EXAMPLES, *sorted((ROOT / "examples" / "setups").glob("*.toml"))], ids=str)
def test_schema_accepts_every_example(example: Path) -> None:
    errors = Draft202012Validator(json_schema()).iter_errors(tomllib.loads(example.read_text("utf-8")))
    assert not [f"{each.json_path}: {each.message}" for each in errors]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("global_batch", "many"),
        ("global_batch", 1.5),
        ("global_batch", 0),
        ("micro_batch_tokens", 400_001),
        ("group_timeout_s", -1.0),
        ("sampler", 1),
        ("x", 1),
    ],
)
def test_schema_rejects_wrong_values_and_keys(key: str, value: object) -> None:
    assert list(Draft202012Validator(json_schema()).iter_errors({"experience": {key: value}}))


def test_units_are_of_existing_keys() -> None:
    assert set(KEY_UNITS) <= set(settings())


def test_sections_follow_the_file_order() -> None:
    keys = [section.key for section in sections()]
    assert keys[0] == "run"
    assert keys.index("trainer") < keys.index("trainer.learner") < keys.index("trainer.learner.algorithm")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_schema_has_every_key_of_the_examples(file: Path) -> None:
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
    assert not [section.key for section in sections() if not section.about]


def test_meanings_name_no_value_that_toml_lacks() -> None:
    texts = [each.about for each in (*settings().values(), *sections())]
    assert not [text for text in texts if "None" in text]
