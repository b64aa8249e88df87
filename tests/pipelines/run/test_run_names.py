"""The default name of a run, and the settings that may change when it resumes."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from operators.trainer import assembly, rank_training
from pipelines.config import ConfigError, parse_config
from pipelines.run import learnability
from pipelines.run.resumable import check_resumable
from pipelines.run.run_names import name_problems, with_run_name
from schemas.release import RELEASE


@pytest.mark.parametrize(
    ("file", "stem"),
    [("my_model.toml", "my-model"), ("/a/Über zwei.v2.toml", "ber-zwei-v2"), ("-.toml", "run"), ("x" * 60, "x" * 40)],
)
def test_run_is_named_after_its_configuration_file(file: str, stem: str) -> None:
    name = with_run_name(parse_config({}, "test"), Path(file)).run.name
    assert name.rpartition("-")[0].rpartition("-")[0] == stem
    assert with_run_name(parse_config({"run": {"name": "mine"}}, "test"), Path(file)).run.name == "mine"


@pytest.mark.parametrize(
    ("files", "state", "free"),
    [
        ((), {"phase": "stopped", "ended_at": 1.0}, True),
        ((), {"phase": "failed", "ended_at": 1.0, "error": "x"}, True),
        ((), {"pid": 2**22 + 1, "pid_created": 1.0}, True),
        ((), {"pid": os.getpid(), "pid_created": psutil.Process().create_time()}, False),
        (("config.toml",), {"phase": "stopped", "ended_at": 1.0}, False),
        (("submitted",), None, False),
    ],
)
def test_name_of_a_run_without_topics_is_free(
    files: tuple[str, ...], state: dict[str, Any] | None, free: bool, tmp_path: Path
) -> None:
    config = parse_config({"run": {"name": "mine", "folder": str(tmp_path)}}, "test")
    for name in ("logs", *files):
        (tmp_path / "mine" / name).mkdir(parents=True)
    if state is not None:
        (tmp_path / "mine" / "state.json").write_text(json.dumps({"release": RELEASE, "run": "mine", **state}))
    found = list(name_problems(config))
    assert [each.partition(" in ")[0] for each in found] == ["run 'mine' exists already"] * (not free)


def test_resumed_run_rejects_other_settings() -> None:
    before = parse_config({}, "test")
    check_resumable(before, parse_config({"trainer": {"optimizer_steps": 90}}, "test"))
    with pytest.raises(ConfigError, match=r"trainer\.learner\.learning_rate cannot change in a resumed run"):
        check_resumable(before, parse_config({"trainer": {"learner": {"learning_rate": 0.5}}}, "test"))
    with pytest.raises(ConfigError, match="optimizer_steps = 3 is less than the run's goal of 80 steps"):
        check_resumable(before, parse_config({"trainer": {"optimizer_steps": 3}}, "test"))


def test_resumed_run_takes_the_settings_that_errors_name() -> None:
    advised = {
        (assembly, "trainer.lost_batches"): "[7]",
        (rank_training, "trainer.learner.max_skipped_batches"): 99,
        (learnability, "run.allow_no_learning"): "true",
    }
    for (module, key), value in advised.items():
        assert key in inspect.getsource(module)
        check_resumable(parse_config({}, "test"), parse_config({}, "test", [f"{key}={value}"]))
