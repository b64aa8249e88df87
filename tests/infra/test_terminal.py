"""Long lines: wrapped between words on a terminal only, with the words whole."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from infra.terminal import wrapped

LONG = "warning: prompts, task 'sums': 4.2 % of 3000 rows are refused (too long: /a/path/that/is/longer/than/a/line)"


@pytest.mark.parametrize("columns", [None, 10, 200])
def test_line_that_fits_or_has_no_terminal_is_whole(columns: int | None) -> None:
    assert wrapped(LONG, columns) == LONG


def test_long_line_is_continued_with_an_indent() -> None:
    lines = wrapped(f"head\n  {LONG}", 40).split("\n")
    assert lines[:2] == ["head", "  warning: prompts, task 'sums': 4.2 %"]
    assert all(line.startswith("    ") for line in lines[2:])
    assert "/a/path/that/is/longer/than/a/line)" in lines[-1]
    assert " ".join(line.strip() for line in lines[1:]) == LONG


def test_a_command_in_backticks_is_not_divided() -> None:
    command = "`laminar runs resume --run first --set trainer.optimizer_steps=200`"
    lines = wrapped(f"once that is fixed, resume the run: {command} continues it, or start another one", 40).split("\n")
    assert f"  {command}" in lines
    assert len(lines) == 3


def test_error_of_a_command_is_wrapped_on_a_terminal_only() -> None:
    name = " ".join(["a", "long", "name"] * 8)
    words = [sys.executable, "-c", "from pipelines.cli.main import main; main()", "run", name]
    piped = subprocess.run(words, capture_output=True, text=True, check=False)
    assert piped.stderr == f"laminar: config file {name} does not exist\n"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(ours, "rb", buffering=0) as shown:
        subprocess.run(words, stderr=theirs, check=False)
        os.close(theirs)
        lines = shown.read(4096).decode().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == piped.stderr.strip()
