"""The script that runs the suite repeatedly: it records every run, continues, and sees what a run leaves."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "soak"))

import green


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits that the working tree has from now on; the last one stays."""
    commits = ["abc"]
    monkeypatch.setattr(green, "checked_out", lambda: commits.pop(0) if len(commits) > 1 else commits[0])
    return commits


def command(folder: Path, program: str) -> list[str]:
    """A command instead of `make test`."""
    (folder / "run.sh").write_text(program)
    return ["sh", str(folder / "run.sh")]


def test_green_runs_what_has_no_result_and_prints_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = command(tmp_path, f'echo "$1" >> {tmp_path}/runs; echo "FAILED tests/a.py::test_b - x"; exit 1')
    green.run_missing(tmp_path, {"abc/0": 0}, command=program)
    program = command(tmp_path, f'echo "$1" >> {tmp_path}/runs')
    green.run_missing(tmp_path, {"abc/0": 0, "abc/1": 1}, ["-x"], program)
    first, second = (tmp_path / "runs").read_text().splitlines()
    assert first == "ARGS=-rfEs"
    assert second.startswith("ARGS=-rfEs -x --shuffle=")
    assert {name: result.green for name, result in green.read_results(tmp_path).items()} == {
        "abc/0": False,
        "abc/1": True,
    }
    *_, failed, passed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"run 1 of 2: FAILED in \d+:\d\d min, as written: tests/a\.py::test_b", failed)
    assert re.match(r"run 2 of 2: green in \d+:\d\d min, shuffled by ", passed)


def test_green_runs_a_target_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Path, tuple[str, ...]]] = []
    monkeypatch.setattr(green, "SOAK", tmp_path)
    monkeypatch.setattr(green, "run_missing", lambda folder, plan, arguments, command: given.append((folder, command)))
    for options in ([], ["--target", "flink-test"]):
        monkeypatch.setattr(sys, "argv", ["green.py", *options])
        with pytest.raises(SystemExit):
            green.main()
    assert given == [
        (tmp_path / "green", ("make", "test")),
        (tmp_path / "green-flink-test", ("make", "flink-test")),
    ]


def test_green_ignores_a_run_during_which_the_commit_changed(tmp_path: Path, commit: list[str]) -> None:
    commit.append("def")
    with pytest.raises(green.CommitChanged, match="run 1 does not count: the working tree is at def, and was at abc"):
        green.run_missing(tmp_path, {"abc/0": 0}, command=command(tmp_path, "true"))
    assert green.read_results(tmp_path) == {}


def test_green_names_processes_that_a_run_leaves(tmp_path: Path) -> None:
    started = "until grep -q sleep /proc/$!/comm; do :; done"  # a shell's child has its name before
    program = command(tmp_path, f'cd "$TMPDIR"; sleep 600 > /dev/null 2>&1 & echo $! > {tmp_path}/pid; {started}')
    green.run_missing(tmp_path, {"abc/0": 0}, command=program)
    (result,) = green.read_results(tmp_path).values()
    pid = int((tmp_path / "pid").read_text())
    green.psutil.Process(pid).kill()
    assert result.left == [f"{pid} sleep 600"]
    assert not result.green
