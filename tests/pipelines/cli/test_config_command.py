"""`laminar config`: explain, defaults, diff and schema."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli.main import main

ROOT = Path(__file__).parents[3]


Config = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Config:
    monkeypatch.chdir(ROOT)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ended:
            main(["config", *words])
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), *capsys.readouterr())

    return call


def test_config_explains_a_key() -> None:
    program = [sys.executable, "-c", "from pipelines.cli.main import main; main()"]
    words = ["config", "--explain", "placement.repack_s", "--json"]
    done = subprocess.run([*program, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    (setting,) = json.loads(done.stdout)
    assert (setting["key"], setting["default"], setting["unit"]) == ("placement.repack_s", "5", "seconds")


def test_config_explains_a_section_without_nested_sections(config: Config) -> None:
    done = config("--explain", "prompts")
    assert "prompts.max_new_tokens: " in done.stdout
    assert "prompts.tasks[].max_new_tokens" not in done.stdout
    assert "Sections within: " in done.stdout
    assert "prompts.tasks[]" in done.stdout.splitlines()[-1]


def test_config_names_similar_keys(config: Config) -> None:
    done = config("--explain", "placement.repak_s")
    assert done.returncode != 0
    assert "similar: placement.repack_s" in done.stderr


def test_config_defaults_are_toml(config: Config) -> None:
    assert tomllib.loads(config("--defaults").stdout)["placement"]["repack_s"] == 5


def test_config_diff_of_two_files(config: Config) -> None:
    done = config("--diff", "examples/chain_sum.toml", "examples/gcd.toml", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["prompts.task"] == ["chain_sum", "gcd"]
    assert config("--diff", "examples/gcd.toml", "examples/gcd.toml").returncode == 0


def test_config_diff_leaves_out_what_each_run_has_for_itself(config: Config, tmp_path: Path) -> None:
    base = (
        "[model]\npath = '{model}'\n[run]\nname = '{name}'\nfolder = '{folder}'\n[relay]\nstore = '/dev/shm/{name}'\n"
    )
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        model = folder / "warm-start"
        (folder / "config.toml").write_text(base.format(name=name, folder=tmp_path, model=model))
    done = config("--diff", str(tmp_path / "one"), str(tmp_path / "two"))
    assert (done.returncode, done.stdout) == (
        0,
        "The settings are equal.\n(of each run, not compared: run.name, relay.store)\n",
    )
    with (tmp_path / "two" / "config.toml").open("a") as file:
        file.write("[trainer]\noptimizer_steps = 7\n[warm_start]\nsteps = 9\n")
    done = config("--diff", str(tmp_path / "one"), str(tmp_path / "two"))
    lines = done.stdout.splitlines()
    assert {'warm_start: unset -> "present"', "warm_start.steps: unset -> 9"} <= set(lines)
    assert [line for line in lines if line.startswith("trainer.")] == ["trainer.optimizer_steps: 80 -> 7"]
    assert len(lines) == 4


def test_config_schema_is_json(config: Config) -> None:
    assert json.loads(config("--schema").stdout)["properties"].keys() >= {"run", "kafka", "trainer"}


@pytest.mark.parametrize("words", [("--diff", "one.toml"), ("--defaults", "--schema"), ("--schema", "extra")])
def test_config_rejects_invalid_usage(config: Config, words: tuple[str, ...]) -> None:
    assert config(*words).returncode == 2


def test_config_diff_names_the_problems_of_both_files(config: Config, tmp_path: Path) -> None:
    for name, text in (("a", "[rollout]\nslot = 1\nslots = 0\n"), ("b", "[kafka]\npartitions = 0\n")):
        (tmp_path / f"{name}.toml").write_text(text)
    done = config("--diff", str(tmp_path / "a.toml"), str(tmp_path / "b.toml"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "laminar: the configurations are not valid: 3 problems",
        f"  {tmp_path}/a.toml: unknown key rollout.slot; did you mean 'slots'?",
        f"  {tmp_path}/a.toml: rollout: slots must be at least 1, not 0",
        f"  {tmp_path}/b.toml: kafka: partitions must be at least 1, not 0",
    ]
