"""`laminar config`: explain, defaults, diff and schema."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def config(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from pipelines.cli.main import main; main()", "config", *words]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_config_explains_a_key() -> None:
    done = config("--explain", "placement.repack_s", "--json")
    (setting,) = json.loads(done.stdout)
    assert (setting["key"], setting["default"], setting["unit"]) == ("placement.repack_s", "5", "seconds")


def test_config_names_similar_keys() -> None:
    done = config("--explain", "placement.repak_s")
    assert done.returncode != 0
    assert "similar: placement.repack_s" in done.stderr


def test_config_defaults_are_toml() -> None:
    assert tomllib.loads(config("--defaults").stdout)["placement"]["repack_s"] == 5


def test_config_diff_of_two_files() -> None:
    done = config("--diff", "examples/chain_sum.toml", "examples/gcd.toml", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["prompts.task"] == ["chain_sum", "gcd"]
    assert config("--diff", "examples/gcd.toml", "examples/gcd.toml").returncode == 0


def test_config_schema_is_json() -> None:
    assert json.loads(config("--schema").stdout)["properties"].keys() >= {"run", "kafka", "trainer"}


@pytest.mark.parametrize("words", [("--diff", "one.toml"), ("--defaults", "--schema"), ("--schema", "extra")])
def test_config_rejects_invalid_usage(words: tuple[str, ...]) -> None:
    assert config(*words).returncode == 2
