"""Running a pipeline: it ends by itself, by a signal or by an error, and is closed in each case."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.runners.runner import PipelineState
from waiting import until

from infra.runners import run
from infra.runners.run import run_pipeline
from infra.runners.stopping import NOTICE, STOPPING, stopping_on_signals
from infra.scratch import remove_left_folders

DONE: list[int] = []


def process(number: int) -> None:
    DONE.append(number)
    if number == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(number: int) -> None:
    raise ValueError(f"cannot take {number}")


def handlers() -> list[object]:
    return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]


def test_run_pipeline_drains_after_a_signal() -> None:
    DONE.clear()
    before, closed = handlers(), []
    run_pipeline(
        lambda p: p | beam.Create([1, 2, 3]) | beam.Map(process), close=lambda: closed.append(STOPPING.is_set())
    )
    assert (sorted(DONE), closed) == ([1, 2, 3], [True])
    assert (handlers(), STOPPING.is_set()) == (before, False)


def test_run_pipeline_raises_errors_and_closes() -> None:
    before, closed = handlers(), []
    with pytest.raises(Exception, match="cannot take 7"):
        run_pipeline(lambda p: p | beam.Create([7]) | beam.Map(fail), close=lambda: closed.append(1))
    assert (closed, handlers()) == ([1], before)


def test_run_pipeline_passes_options_to_the_pipeline() -> None:
    job_names = []
    run_pipeline(
        lambda p: job_names.append(p.options.get_all_options()["job_name"]) or p | beam.Create([1]),
        beam_options=["--job_name=mine"],
    )
    assert job_names == ["mine"]


def test_run_pipeline_removes_folders_of_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{run.BEAM_FOLDERS}left" / "beam-pipeline-temp").mkdir(parents=True)
    folders: list[Path] = []

    def build(pipeline: beam.Pipeline) -> None:
        folders[:] = tmp_path.iterdir()
        assert folders == [Path(pipeline.local_tempdir).parent]
        remove_left_folders(run.BEAM_FOLDERS)  # as another process that starts now
        assert folders[0].is_dir()
        pipeline | beam.Create([1])

    run_pipeline(build)
    assert folders[0].name.startswith(run.BEAM_FOLDERS)
    assert list(tmp_path.iterdir()) == []


def test_run_pipeline_stops_while_waiting_for_a_job_server() -> None:
    closed, options = [], ["--job_endpoint=127.0.0.1:1"]
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        until(lambda: signal.getsignal(signal.SIGTERM) != before)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    run_pipeline(lambda p: p | beam.Create([1]) | beam.Map(fail), "portable", options, lambda: closed.append(1))
    stopping.join()
    assert closed == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_is_set_by_both_signals(number: signal.Signals) -> None:
    with stopping_on_signals():
        os.kill(os.getpid(), number)
        assert STOPPING.wait(1)
    assert not STOPPING.is_set()


def test_first_sigterm_gives_notice_to_a_step_that_accepts_it() -> None:
    with stopping_on_signals():
        NOTICE.accept()
        os.kill(os.getpid(), signal.SIGTERM)
        assert NOTICE.given_at is not None
        assert not STOPPING.is_set()
        NOTICE.end()
        assert STOPPING.is_set()
    assert NOTICE.given_at is None


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_after_a_notice_stops_at_once(second: signal.Signals) -> None:
    with stopping_on_signals():
        NOTICE.accept()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
        assert STOPPING.is_set()


def test_sigint_stops_at_once_even_if_notices_are_accepted() -> None:
    with stopping_on_signals():
        NOTICE.accept()
        os.kill(os.getpid(), signal.SIGINT)
        assert STOPPING.is_set()


def test_stop_cancels_a_job_whose_steps_run_elsewhere_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "DRAIN_S", 120.0)
    cancelled = threading.Event()

    class Result:
        state = PipelineState.CANCELLED

        def cancel(self) -> None:
            cancelled.set()

        def wait_until_finish(self) -> None:
            assert cancelled.wait(60)
            raise RuntimeError("the job is CANCELLED")

    with stopping_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        run._wait_until_finish(Result(), 0.0)  # type: ignore[arg-type]
    assert cancelled.is_set()
