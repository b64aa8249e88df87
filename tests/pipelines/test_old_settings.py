"""Conditions of prompts in the form of release 0.2.0: the error has them in the new form."""

from __future__ import annotations

from typing import Any

import pytest

from infra.conditions.grammar import parse_condition
from pipelines.config import ConfigError, parse_config
from pipelines.old_settings import condition_text


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, ""),
        ({"rate": {"least": 0.2, "below": 0.6}}, "rate >= 0.2 and rate < 0.6"),
        ({"a.b": 1, "my level": "x'y", "on": True}, "a.b = 1 and `my level` = 'x\\'y' and on = true"),
        ({"subject": ["algebra", "sets"]}, "subject in ('algebra', 'sets')"),
    ],
)
def test_old_condition_in_the_new_form(where: dict[str, Any], expected: str) -> None:
    assert condition_text(where) == expected
    if expected:
        parse_condition(expected)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ({"where": {"rate": {"below": 0.6}}}, 'write where = "rate < 0.6"'),
        ({"where": {}}, "write no where at all"),
        ({"levels": [{"grade": 1}, {"grade": 2}]}, 'write levels = ["grade = 1", "grade = 2"]'),
        ({"tasks": [{"name": "a", "where": {"grade": 1}}]}, 'write where = "grade = 1"'),
    ],
)
def test_config_with_an_old_condition_names_the_new_form(prompts: dict[str, Any], expected: str) -> None:
    table = {"prompts": {"source": "jsonl", "path": "rows.jsonl", **prompts}}
    with pytest.raises(ConfigError) as error:
        parse_config(table, "config.toml")
    assert str(error.value).startswith("config.toml: a condition of [prompts] is a table, the form of release 0.2.0")
    assert expected in str(error.value)


def test_config_with_the_old_number_of_gpus_names_the_new_key() -> None:
    with pytest.raises(ConfigError, match=r"gpus is a number, .*; write tensor_parallel = 2"):
        parse_config({"rollout": {"engine": "vllm", "gpus": 2}}, "config.toml")
