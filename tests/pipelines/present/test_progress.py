"""What a command does before its first result: a line for each part, and one at intervals while it lasts."""

from __future__ import annotations

import queue
import re

from pipelines.present.progress import ProgressPrinter


def test_progress_prints_what_begins_and_that_it_lasts() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with ProgressPrinter("loads the libraries", lines.put, every_s=0.01) as progress:
        assert lines.get(timeout=30) == "loads the libraries"
        assert lines.get(timeout=30).startswith("loads the libraries (")
        progress.begin("checks the prompts")
        while (line := lines.get(timeout=30)) != "checks the prompts":
            assert line.startswith("loads the libraries (")
        assert lines.get(timeout=30).startswith("checks the prompts (")


def test_progress_prints_its_first_line_earlier_than_others() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with ProgressPrinter(
        "exports", lines.put, every_s=3600.0, only_slow=True, first_s=0.01, so_far=lambda: ": 5 rows so far"
    ):
        assert re.fullmatch(r"exports: 5 rows so far \(\d+ s\)", lines.get(timeout=30))
    assert lines.empty()


def test_progress_of_a_quick_command_is_silent() -> None:
    lines: list[str] = []
    with ProgressPrinter("loads the libraries", lines.append, only_slow=True) as progress:
        progress.begin("checks the prompts")
    assert lines == []
