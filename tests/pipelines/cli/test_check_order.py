"""Errors that are cheap to find come before the imports that take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pipelines.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("imported:", *sorted({"torch", "pandas", "apache_beam"} & sys.modules.keys()))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nname = "known"\nfolder = "{tmp_path}/runs"\n[model]\npath = "models/mine"\n'
        '[kafka]\nbootstrap_servers = "kafka:9092"\n'
    )
    (tmp_path / "runs" / "known").mkdir(parents=True)
    for name in ("state.json", "config.toml"):
        (tmp_path / "runs" / "known" / name).write_text("{}")
    return file


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("run", "CONFIG"), "run 'known' exists already"),
        (("deploy", "CONFIG", "files"), "models/mine', but must be below deploy.volume_path"),
    ],
)
def test_command_checks_its_configuration_before_slow_imports(
    words: tuple[str, ...], reason: str, config: Path
) -> None:
    arguments = [str(config) if word == "CONFIG" else word for word in words]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stdout == "imported:\n"


def test_tokenizer_of_a_check_needs_no_library_of_models() -> None:
    program = "import sys, infra.models.checkpoint_folder; print('transformers.modeling_utils' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
