"""Jobs of a Flink cluster are cancelled by their name, by a REST interface that responds as Flink's does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions
from fake_flink import FakeFlink, fake_flink

from infra.kafka.broker import free_port
from infra.runners import flink_jobs
from infra.runners.flink_jobs import UncancelledJob, UnsupportedFlink, cancel_jobs, numbered, sole_job
from infra.runners.run import _options, local_job_server
from infra.runners.stopping import STOPPING

NAME = "laminar-run-data-plane-0a1b2c3d"
OWN = numbered(NAME)
ANY = re.compile(f"{NAME}.*")


@pytest.fixture
def flink() -> Iterator[FakeFlink]:
    with fake_flink() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink_jobs, "POLL_S", 0.001)


def fail_with_a_job(flink: FakeFlink, *jobs: list[str]) -> None:
    flink.jobs = [*jobs] or [["new", OWN, "RUNNING"]]
    raise ValueError("the job server died")


def states(flink: FakeFlink) -> list[str]:
    return [state for _, _, state in flink.jobs]


def test_cancel_ends_the_jobs_of_the_name_alone(flink: FakeFlink) -> None:
    flink.jobs = [["a", NAME, "RUNNING"], ["b", "another", "RUNNING"], ["c", NAME, "FAILED"], ["d", NAME, "RESTARTING"]]
    flink.listings = 4
    assert cancel_jobs(f"http://{flink.address}", ANY) == ["a", "c", "d"]
    assert set(flink.cancelled) == {"a", "d"}
    assert "CANCELLING" not in states(flink), "the jobs have ended"
    assert states(flink)[1] == "RUNNING"


def test_cancel_accepts_that_a_job_ends_by_itself(flink: FakeFlink) -> None:
    flink.jobs, flink.ends_by_itself = [["a", NAME, "RUNNING"]], True
    assert cancel_jobs(flink.address, ANY) == ["a"]
    assert states(flink) == ["FINISHED"]


def test_cancel_names_a_job_that_does_not_end(flink: FakeFlink) -> None:
    flink.jobs, flink.listings = [["a1b2", NAME, "RUNNING"]], 10**6
    with pytest.raises(UncancelledJob, match=rf"job a1b2 \({NAME}\) of the Flink at .* has not ended 0.1 s after"):
        cancel_jobs(flink.address, ANY, within_s=0.1)


def test_cancel_without_a_flink_is_an_error() -> None:
    with pytest.raises(UnsupportedFlink, match=r"no Flink responds at .*/jobs/overview"):
        cancel_jobs(f"127.0.0.1:{free_port()}", ANY)


def test_submission_cancels_the_job_of_a_killed_submitter(flink: FakeFlink) -> None:
    others = [f"{NAME}-1-0a1b2c3d4e5f", f"{NAME}-too", f"x{NAME}"]  # also names that contain it
    flink.jobs = [["old", numbered(NAME), "RUNNING"], ["older", NAME, "RUNNING"]]  # of an earlier release
    flink.jobs += [[name, name, "RUNNING"] for name in others]
    flink.listings = 3
    with sole_job(flink.address, OWN):
        assert states(flink) == ["CANCELED", "CANCELED", "RUNNING", "RUNNING", "RUNNING"]
        flink.jobs.append(["new", OWN, "RUNNING"])
        flink.listings = 2
    assert flink.cancelled == ["old", "older", "new"]
    assert states(flink)[-1] == "CANCELED"


def test_stop_leaves_the_job_of_a_later_submission(flink: FakeFlink) -> None:
    """A submitting process that was stopped for a while, or cut off, ends after its successor has started."""
    jobs = [["own", OWN, "CANCELED"], ["later", numbered(NAME), "RUNNING"]]
    with sole_job(flink.address, OWN):
        flink.jobs = jobs
    flink.jobs = []
    with pytest.raises(ValueError, match="the job server died"), sole_job(flink.address, OWN):
        fail_with_a_job(flink, *jobs)
    assert flink.cancelled == []


@pytest.mark.parametrize("given", [[f"--job_name={NAME}"], ["--job_name", NAME], []])
def test_each_submission_has_a_job_name_of_its_own(given: list[str]) -> None:
    names = []
    for _ in range(2):
        with _options("flink", ["--job_endpoint=localhost:1", *given]) as options:
            names.append(PipelineOptions(options).view_as(GoogleCloudOptions).job_name)
    assert len(set(names)) == 2
    shared = NAME if given else "laminar-[0-9a-f]{12}"
    assert all(re.fullmatch(f"{shared}-[0-9a-f]{{12}}", name) for name in names)


def test_stop_cancels_a_job_that_appears_late(flink: FakeFlink) -> None:
    flink.jobs = [["old", NAME, "FAILED"]]
    with sole_job(flink.address, OWN):
        flink.late = [["new", OWN, "CREATED"]]
    assert flink.cancelled == ["new"]


def test_failure_cancels_the_job_and_is_raised_itself(flink: FakeFlink) -> None:
    with pytest.raises(ValueError, match="the job server died"), sole_job(flink.address, OWN):
        fail_with_a_job(flink)
    assert flink.cancelled == ["new"]


def test_job_of_a_users_job_server_is_cancelled(flink: FakeFlink, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--job_endpoint=jobs:8099", f"--flink_master={flink.address}", f"--job_name={OWN}"]
    with local_job_server("flink", options) as endpoint:
        flink.jobs = [["new", OWN, "RUNNING"]]
    assert (endpoint, flink.cancelled) == (None, ["new"])
    monkeypatch.setattr("infra.runners.flink._SLOTS_S", 0.0)
    lacking = local_job_server("flink", [*options, "--parallelism=3"])
    with pytest.raises(UnsupportedFlink, match="2 of them free, but the job needs 3"), lacking:
        pass


def test_job_of_an_unknown_cluster_may_run_on(caplog: pytest.LogCaptureFixture) -> None:
    options = ["--job_endpoint=jobs:8099", "--environment_type=EXTERNAL", f"--job_name={NAME}"]
    try:
        with local_job_server("flink", options):
            STOPPING.set()
    finally:
        STOPPING.clear()
    (error,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert error.startswith(f"job {NAME} may run on: ")
    assert "--flink_master" in error
