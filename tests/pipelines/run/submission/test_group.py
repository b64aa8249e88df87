"""A group of processes: each reports its liveness in its own file; they end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from infra.runners.liveness import VARIABLE
from pipelines.run.submission.group import run_group


def shell(*lines: str) -> list[list[str]]:
    return [["sh", "-c", line] for line in lines]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (("exit 0", "exit 0"), 0),
        (("exit 3", "exit 0"), 3),
        (("exit 2", "exec sleep 1000", "exec sleep 1000"), 2),  # the others are stopped
    ],
)
def test_group_ends_with_the_first_failure(lines: tuple[str, ...], code: int) -> None:
    assert run_group(shell(*lines), range(len(lines))) == code


def test_group_has_a_liveness_file_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "alive"))
    assert run_group(shell(*2 * [f'touch "${VARIABLE}"']), (8, 9)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive-8", "alive-9"]


def test_group_starts_without_reports_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say that its processes are ready, and the folder outlives a container."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "alive"))
    for number in (7, 8, 9):
        (tmp_path / f"alive-{number}").write_text('{"ready": true}')
    assert run_group(shell("true", "true"), (8, 9)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["alive-7"]


@pytest.mark.parametrize(("option", "removed"), [((), True), (("--dry-run",), False)])
def test_submit_removes_the_report_of_the_process_before(
    option: tuple[str, ...],
    removed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    file, config = tmp_path / "alive", tmp_path / "run.toml"
    file.write_text('{"ready": true}')
    config.write_text("[run]\nname = 5\n")  # so that it ends before it reports
    monkeypatch.setenv(VARIABLE, str(file))
    assert command("submit", "score", str(config), *option)[0] == 2
    assert file.exists() != removed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("rollout", "--replica", "3", "--group-size", "2"), "name a group by --index, which counts groups"),
        (("relay", "--machine", "m7", "--group-size", "2"), "name a group by --index, which counts groups"),
        (("score", "--dry-run", "--detach"), "--dry-run submits nothing: leave out --detach"),
        (("score", "--svg", "score.svg"), "only --dry-run draws the graph"),
    ],
)
def test_submit_refuses_options_that_exclude_each_other(
    words: tuple[str, ...], reason: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    role, *options = words
    code, _, err = command("submit", role, "run.toml", *options)
    assert (code, reason in " ".join(err.split())) == (2, True), err


def test_group_passes_signals_on(tmp_path: Path) -> None:
    drained = tmp_path / "drained"
    script = f"trap 'echo drained >> {drained}; exit 0' TERM; echo > {tmp_path}/up-$$; while :; do sleep 0.05; done"
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    waiting = threading.Thread(target=stop)
    waiting.start()
    assert run_group(shell(script, script), (0, 1)) == 0
    waiting.join()
    assert drained.read_text() == "drained\n" * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_group_passes_on_a_signal_that_comes_during_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], subprocess.Popen

    def start_and_stop(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(command, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_stop)
    run_group(shell("exec sleep 5", "exec sleep 5"), (0, 1))
    assert [each.returncode for each in started] == [-signal.SIGTERM]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["evaluation", "--group-size", "2"], "evaluation has one process only"),
        (["score", "--group-size", "2", "--detach"], "a group runs in the foreground"),
        (["data-plane", "--index", "0"], "has all shards of its roles"),
        (["rollout", "--machine", "node-1"], "--machine is only for relay"),
        (["relay", "--machine", "node-1", "--index", "1"], "excludes --index"),
    ],
)
def test_submit_rejects_a_group_or_machine_of_other_roles(options: list[str], reason: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    command = [str(Path(sys.executable).with_name("laminar")), "submit", options[0], str(file), *options[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert reason in " ".join(done.stderr.replace("│", " ").split())
