"""`laminar run`, from the command to the files that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from laminar_runs import REPOSITORY, LaminarRun
from transformers import AutoModelForCausalLM, AutoTokenizer

from operators.trainer.checkpoint import list_checkpoints, read_position
from pipelines.config import load_config
from pipelines.report.metrics_file import read_metrics
from pipelines.roles import roles_of
from schemas.records import PolicyVersion

NAME = f"whole-run-{os.getpid()}"
STEPS = 8


class _Terminal:
    """Starts the command as a shell does, imports and all."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: list[str], folder: Path, output: Path) -> int:
        command = [sys.executable, "-c", "from pipelines.cli.main import main; main()", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with output.open("wb") as file:
            self._process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env=environment)
        return self._process.pid

    def exit_code(self, pid: int) -> int | None:
        assert self._process is not None
        return self._process.poll()


@pytest.fixture(scope="module")
def ended(small_config: Path, tmp_path_factory: pytest.TempPathFactory) -> LaminarRun:
    run = LaminarRun(_Terminal(), tmp_path_factory.mktemp("here"), small_config, NAME)  # type: ignore[arg-type]
    try:
        run.wait(170)
        left = run.traces()
    finally:
        run.end()
    assert not left
    return run


def test_it_ends_well_and_its_books_balance(ended: LaminarRun) -> None:
    assert ended.exit_code() == 0, ended.said()
    audit = ended.audit()
    assert audit["balanced"]
    assert audit["trained"] == STEPS * 16
    assert audit["evaluated"] == 32  # eight questions, greedy and sampled, of the first and the last version
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)
    summary = json.loads((ended.folder / "summary.json").read_text())
    assert summary["reached"]
    assert summary["balanced"]
    state = ended.state()
    assert (state["phase"], state["error"], state["goal"]) == ("ended", None, {"optimizer_steps": STEPS})
    assert list(state["phases"]) == ["starting", "broker", "training", "final evaluation", "draining", "audit"]
    assert not any(role["restarts"] or role["alive"] for role in state["roles"].values())


def test_the_folder_holds_all_of_it(ended: LaminarRun, model_folder: Path) -> None:
    folder = ended.folder
    assert (folder.parent / "latest").resolve() == folder
    config = load_config(folder / "config.toml")
    assert (config.run.name, config.run_folder, config.model.path) == (NAME, folder, str(model_folder))
    assert config.kafka.bootstrap_servers == ended.state()["bootstrap_servers"]
    for role in roles_of(config):
        log = (folder / "logs" / f"{role.name}.log").read_text()
        assert f"{role.name} starts" in log
        assert "Traceback" not in log
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [metric.step for metric in metrics if metric.name == "trainer"] == list(range(1, STEPS + 1))
    assert "<svg" in (folder / "report.html").read_text()


def test_its_model_and_checkpoints_load(ended: LaminarRun) -> None:
    checkpoints = list_checkpoints(ended.folder / "checkpoints")
    assert [read_position(folder).version for folder in checkpoints] == [PolicyVersion(1, 6), PolicyVersion(1, 8)]
    model = AutoModelForCausalLM.from_pretrained(ended.folder / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(ended.folder / "model", local_files_only=True)
    assert model.generate(**tokenizer("1 + 1 =", return_tensors="pt"), max_new_tokens=2).shape[0] == 1


def test_what_the_command_imports_itself_is_light() -> None:
    code = "import sys, pipelines.run.local; print(*{'torch', 'apache_beam', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == ""
