"""A respawner keeps its role running while the disk of the run is full, and without its log; not without its run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from waiting import until

from infra.processes import is_locked
from pipelines.inspect.submissions import Submission, read_submission
from pipelines.run.submission import respawner
from pipelines.run.submission.respawner import Respawner

ROOT = Path(__file__).parents[4]
TWICE = """
if [ -e {first} ]; then rm {filler}; exit 0; fi
touch {first}
exit 1
"""
"""A role that ends with an error first; when it runs again, the disk has room once more, and it drains."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, which a respawner replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_respawner_goes_on_with_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "run", 512) as folder:
        submission = Submission(folder, "score", 0, "embedded")
        for file in (submission.file, submission.log):
            file.parent.mkdir(parents=True)
        submission.log.write_text("laminar: no Kafka\n")
        submission.write()
        fill(folder)
        script = TWICE.format(first=tmp_path / "first", filler=folder / "filler")
        monkeypatch.setattr(respawner, "LAMINAR", ("sh", "-c", script, "sh"))
        respawning = Respawner(submission)
        respawning.run()
        written = read_submission(submission.file)
        assert (written.state, written.restarts) == ("ended", 1)
        assert written.last_error is not None
        assert written.last_error.startswith("its log is empty")


@pytest.mark.usefixtures("handlers")
def test_log_is_locked_while_its_role_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this lock another container that shares the folder sees that the role works."""
    submission = Submission(tmp_path, "score", 0, "embedded")
    for file in (submission.file, submission.log):
        file.parent.mkdir()
    submission.log.touch()
    log, kept = str(submission.log), tmp_path / "kept"
    role = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from infra.processes import is_locked
if os.fork() == 0:  # the role outlives its respawner
    while not Path({str(kept)!r}).exists(): time.sleep(0.01)
    os._exit(0)
os._exit(0 if is_locked(Path({log!r})) else 2)
"""
    monkeypatch.setattr(respawner, "LAMINAR", (sys.executable, "-c", role))
    Respawner(submission).run()
    assert read_submission(submission.file).state == "ended"
    assert is_locked(submission.log)
    kept.touch()
    until(lambda: not is_locked(submission.log))


@pytest.mark.usefixtures("handlers")
def test_respawner_goes_on_without_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submission = Submission(tmp_path, "score", 0, "embedded")
    submission.file.parent.mkdir()
    script = TWICE.format(first=tmp_path / "first", filler=tmp_path / "first")
    monkeypatch.setattr(respawner, "LAMINAR", ("sh", "-c", script, "sh"))
    Respawner(submission).run()
    written = read_submission(submission.file)
    assert (written.state, written.restarts) == ("ended", 1)
    assert (written.last_error or "").startswith("its log is empty")


@pytest.mark.usefixtures("handlers")
def test_respawner_stops_the_role_of_a_deleted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submission = Submission(tmp_path / "run", "score", 0, "embedded")
    submission.file.parent.mkdir(parents=True)
    submission.write()
    started = f"until grep -q 'worker.: [0-9]' {submission.file}; do sleep 0.01; done"
    script = f"{started}; mv {submission.folder} {tmp_path / 'deleted'}; exec sleep 60"
    monkeypatch.setattr(respawner, "LAMINAR", ("sh", "-c", script, "sh"))
    monkeypatch.setattr(respawner, "POLL_S", 0.01)
    respawning = Respawner(submission)
    respawning.run()
    assert f"{submission.file} has been deleted: score is stopped" in capsys.readouterr().out
    assert respawning._child is not None
    assert respawning._child.returncode == -signal.SIGTERM
    assert not submission.folder.exists()
