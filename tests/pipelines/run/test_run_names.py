"""The default name of a run, and the settings that may change when it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import ConfigError, parse_config
from pipelines.run.local import check_resumable
from pipelines.run.run_names import with_run_name


@pytest.mark.parametrize(
    ("file", "stem"),
    [("my_model.toml", "my-model"), ("/a/Über zwei.v2.toml", "ber-zwei-v2"), ("-.toml", "run"), ("x" * 60, "x" * 40)],
)
def test_run_is_named_after_its_configuration_file(file: str, stem: str) -> None:
    name = with_run_name(parse_config({}, "test"), Path(file)).run.name
    assert name.rpartition("-")[0].rpartition("-")[0] == stem
    assert with_run_name(parse_config({"run": {"name": "mine"}}, "test"), Path(file)).run.name == "mine"


def test_resumed_run_rejects_other_settings() -> None:
    before = parse_config({}, "test")
    check_resumable(before, parse_config({"trainer": {"optimizer_steps": 90}}, "test"))
    with pytest.raises(ConfigError, match=r"trainer\.learner\.learning_rate cannot change in a resumed run"):
        check_resumable(before, parse_config({"trainer": {"learner": {"learning_rate": 0.5}}}, "test"))
    with pytest.raises(ConfigError, match="optimizer_steps = 3 is less than the run's goal of 80 steps"):
        check_resumable(before, parse_config({"trainer": {"optimizer_steps": 3}}, "test"))
