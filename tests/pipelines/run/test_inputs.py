"""The files that a run reads: which they are, and which changes a resumed run refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config import Config, parse_config
from pipelines.run import inputs
from pipelines.run.inputs import accept_inputs, changed_inputs, record_inputs


def config_of(folder: Path, **sections: Any) -> Config:
    """A configuration whose files are in `folder`: rows, a model, a reward, and an environment in a package."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "mine.py").write_text("import json\nfrom beside import value\nfrom parts import one\n")
    (folder / "beside.py").write_text("def value(): return 1\n")
    (folder / "parts").mkdir()
    (folder / "unused.py").write_text("")
    (folder / "learner.py").write_text("")
    for name in ("__init__.py", "one.py", "other.py"):
        (folder / "parts" / name).write_text("from . import other\n" if name == "one.py" else "")
    table: dict[str, Any] = {
        "run": {"folder": str(folder / "runs"), "name": "r"},
        "model": {"path": str(folder / "model")},
        "prompts": {"source": "jsonl", "path": str(folder / "rows.jsonl")},
        "score": {"rewards": [{"name": f"{folder}/mine.py:mine"}]},
        "trainer": {"learner": {"name": f"{folder}/learner.py:Own"}},
        **sections,
    }
    return parse_config(table, "test")


def test_changed_inputs_names_each_file_until_it_is_accepted(tmp_path: Path) -> None:
    config, file = config_of(tmp_path), tmp_path / "inputs.json"
    assert changed_inputs(config, file) == []  # of an earlier release
    record_inputs(config, file)
    for name in ("unused.py", "model/.cache"):
        (tmp_path / name).write_text("changed")
    assert changed_inputs(config, file) == []
    for name in ("rows.jsonl", "mine.py", "beside.py", "learner.py", "parts/other.py", "model/config.json"):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{before} ")
        assert changed_inputs(config, file) == [f"{tmp_path / name} has changed"]
        (tmp_path / name).write_text(before)
    (tmp_path / "beside.py").unlink()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    changed = changed_inputs(config, file)
    assert changed == [f"{tmp_path}/beside.py is missing", f"{tmp_path}/model/tokenizer.json is new"]
    accept_inputs(config, file, changed)
    assert changed_inputs(config, file) == []


def test_module_of_a_hook_is_found_without_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "parts").mkdir()
    config = config_of(tmp_path / "files", score={"rewards": [{"name": "parts.rewards:mine"}]})
    (tmp_path / "parts" / "__init__.py").write_text("raise AssertionError\n")
    (tmp_path / "parts" / "rewards.py").write_text("from .texts import value\n")
    (tmp_path / "parts" / "texts.py").write_text("")
    record_inputs(config, file := tmp_path / "inputs.json")
    (tmp_path / "parts" / "texts.py").write_text("value = 2\n")
    assert changed_inputs(config, file) == [f"{tmp_path}/parts/texts.py has changed"]


def test_large_file_counts_by_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 1 << 20)
    config, file, large = config_of(tmp_path), tmp_path / "inputs.json", tmp_path / "model" / "model.safetensors"
    large.write_bytes(bytes(5 << 20))
    record_inputs(config, file)
    large.write_bytes(bytes(5 << 20))
    assert changed_inputs(config, file) == []
    large.write_bytes(bytes((5 << 20) - 1) + b"1")
    assert changed_inputs(config, file) == [f"{large} has changed"]


def test_environment_of_laminar_is_no_file_of_the_user(tmp_path: Path) -> None:
    prompts = {"task": "gcd", "environment": "operators.rollout.environments.guess:Guess"}
    config = config_of(tmp_path, prompts=prompts, score={"rewards": [{"name": "environment"}]}, trainer={})
    record_inputs(config, file := tmp_path / "inputs.json")
    assert f'"{tmp_path}/model/config.json"' in file.read_text()
    assert ".py" not in file.read_text()


def test_inputs_have_the_imports_of_environments_in_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute ones of its own package; a submitted rollout reads them, too."""
    monkeypatch.syspath_prepend(tmp_path)
    rows = str(tmp_path / "files" / "rows.jsonl")
    config = config_of(
        tmp_path / "files", prompts={"source": "jsonl", "path": rows, "environment": "own_package.env:Env"}
    )
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "env.py").write_text("import json\nfrom own_package.tools import tool\n")
    for name in ("__init__.py", "tools.py", "others.py"):
        (package / name).write_text("")
    for sections in (inputs.SECTIONS, frozenset({"rollout"})):
        record_inputs(config, tmp_path / "inputs.json", sections)
        for name in ("env.py", "tools.py", "others.py"):
            (package / name).write_text((package / name).read_text() + "\n")
        assert set(changed_inputs(config, tmp_path / "inputs.json", sections)) == {
            f"{package / name} has changed" for name in ("env.py", "tools.py")
        }


def test_inputs_have_the_script_of_an_agents_command(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "files",
        prompts={"source": "jsonl", "path": str(tmp_path / "files" / "rows.jsonl"), "environment": "agent"},
        agents={"command": ["python3", str(tmp_path / "agent.py")]},
    )
    (tmp_path / "agent.py").write_text("")
    record_inputs(config, tmp_path / "inputs.json")
    (tmp_path / "agent.py").write_text("changed")
    assert changed_inputs(config, tmp_path / "inputs.json") == [f"{tmp_path / 'agent.py'} has changed"]
