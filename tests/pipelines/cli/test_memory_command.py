"""`laminar train memory`: the documented set-ups, and the memory of a rank of a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_batches import save_tiny_model

from operators.trainer.config import LearnerConfig
from operators.trainer.memory_plan import TARGETS, plan_memory, shape_of
from pipelines.cli.main import main

CONFIG = """
[model]
path = "{model}"
[trainer]
ranks = 4
"""


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, float]]:
    """The rows that the command prints as JSON."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "memory", *words, "--json"])
    assert not ended.value.code
    return list(json.loads(capsys.readouterr().out)["rows"])


def test_train_memory_prints_the_documented_set_ups(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys)
    assert [row["model"] for row in rows] == [target.model for target in TARGETS]
    assert [row["total"] for row in rows] == pytest.approx([target.plan().total / 1e9 for target in TARGETS])


def test_train_memory_prints_the_rollouts_of_the_set_ups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "memory"])
    assert not ended.value.code
    rollouts = capsys.readouterr().out.partition("a GPU of a rollout")[2]
    lines = [line.split() for line in rollouts.splitlines()]
    assert ["MODEL", "GPUS", "SLOTS", "CONTEXT", "WEIGHTS", "KV", "TOTAL"] in lines
    assert ["Qwen2.5-72B", "4", "40", "8192", "36.4", "26.8", "63.2"] in lines
    assert ["Qwen2.5-32B", "12", "49.1", "66", "82"] in lines


def test_train_memory_of_a_configuration_divides_a_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "run.toml"
    file.write_text(CONFIG.format(model=model))
    expected = [plan_memory(shape_of(model), ranks, LearnerConfig()).total / 1e9 for ranks in (4, 2)]
    (one_copy,) = rows_of(capsys, str(file))
    (two_copies,) = rows_of(capsys, str(file), "--set", "trainer.shard_ranks=2")
    assert [one_copy["total"], two_copies["total"]] == pytest.approx(expected)
    assert one_copy["ranks"] == two_copies["ranks"] == 4


def test_train_memory_counts_the_longest_responses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "run.toml"
    file.write_text(CONFIG.format(model=model))
    context, longest = ("--set", "rollout.context=8192"), ("prompts.task=chain_sum", "prompts.max_new_tokens=16384")
    (usual,) = rows_of(capsys, str(file), *context)
    (longer,) = rows_of(capsys, str(file), *context, *(word for each in longest for word in ("--set", each)))
    assert longer["activations"] == pytest.approx(8 * usual["activations"])  # 8192 tokens, not 1024


def test_train_memory_names_a_folder_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(model=tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["train", "memory", str(file)])
    assert ended.value.code
    assert f"the model in {tmp_path}" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_train_memory_names_a_missing_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "run.toml"
    config = json.loads((model / "config.json").read_text())
    del config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config))
    file.write_text(CONFIG.format(model=model))
    with pytest.raises(SystemExit) as ended:
        main(["train", "memory", str(file)])
    assert ended.value.code
    assert "has no 'vocab_size'" in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("words", [("--model", "models/mine"), ("--set", "trainer.ranks=2")])
def test_memory_of_the_set_ups_takes_no_changes(
    words: tuple[str, str], command: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = command("train", "memory", *words)
    assert (code, "the documented set-ups are fixed: give CONFIG, too" in " ".join(err.split())) == (2, True)
