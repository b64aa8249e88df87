"""A Flink cluster of another version than the job server's, or none, is rejected before a job server starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions, PortableOptions

from infra.kafka.broker import free_port
from infra.runners import flink, flink_jobs, run
from infra.runners.flink import check_capacity, check_cluster, check_own_server, running_flink
from infra.runners.flink_jars import BEAM, FLINK
from infra.runners.flink_jobs import UnsupportedFlink
from infra.runners.local_server import ALLOW_VARIABLE
from infra.runners.options import ALLOW_UNTESTED
from infra.runners.run import local_job_server, run_pipeline


@contextmanager
def cluster(body: bytes, slots: bytes = b"", managers: Sequence[int] = ()) -> Iterator[str]:
    """The address of a REST interface that answers `/config` with `body`, and `/overview` with `slots`; `managers` are
    the slots of each task manager."""
    listed = json.dumps({"taskmanagers": [{"id": "t", "slotsNumber": each, "freeSlots": 0} for each in managers]})
    replies = {
        "/config": body,
        "/overview": slots,
        "/taskmanagers": listed.encode(),
        "/jobs/overview": b'{"jobs": []}',
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in replies else 404)
            self.end_headers()
            self.wfile.write(replies.get(self.path, b""))

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def config(version: object) -> bytes:
    return json.dumps({"refresh-interval": 3000, "flink-version": version}).encode()


def overview(slots: int, free: int) -> bytes:
    return json.dumps({"taskmanagers": 2, "slots-total": slots, "slots-available": free}).encode()


@pytest.mark.parametrize("version", ["1.19.1", "1.19.3", "1.19-SNAPSHOT", "1.19"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_cluster_of_the_job_servers_version_is_accepted(
    version: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with cluster(config(version)) as address:
        check_cluster(scheme + address)


@pytest.mark.parametrize("version", ["2.2.0", "1.20.0", "1.190", "1.1", "", None, 2])
def test_cluster_of_another_version_is_rejected_with_both(version: object) -> None:
    with cluster(config(version)) as address, pytest.raises(UnsupportedFlink) as rejected:
        check_cluster(address)
    for part in (address, str(version), "Beam 2.70.0 for Flink 1.19", "--job_endpoint", ALLOW_UNTESTED):
        assert part in str(rejected.value)


def test_cluster_with_too_few_slots_is_rejected_with_numbers() -> None:
    with cluster(config(FLINK), overview(3, 3)) as address:
        check_capacity(address, 3)
        with pytest.raises(UnsupportedFlink, match="has 3 task slots, 3 of them free, but the job needs 4: start more"):
            run_pipeline(lambda pipeline: None, "flink", [f"--flink_master={address}", "--parallelism=4"])


def test_cluster_whose_slots_are_in_use_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink, "_SLOTS_S", 0.0)
    with (
        cluster(config(FLINK), overview(4, 1)) as address,
        pytest.raises(
            UnsupportedFlink, match=r"has 4 task slots, 1 of them free, but the job needs 2: .* cancel other"
        ),
    ):
        check_capacity(address, 2)


def test_job_without_parallelism_needs_a_free_slot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flink, "_SLOTS_S", 0.0)
    default = PipelineOptions([]).view_as(FlinkRunnerOptions).parallelism
    with cluster(config(FLINK), overview(2, 0)) as address, pytest.raises(UnsupportedFlink, match="the job needs 1: "):
        check_capacity(address, default)
    with cluster(config(FLINK), overview(0, 0)) as address:
        check_capacity(address, default)
    assert caplog.messages[0].endswith("until task managers with 1 have started")


def test_cluster_without_slots_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It may start task managers when a job is submitted."""
    with cluster(config(FLINK), overview(0, 0)) as address:
        check_capacity(address, 4)
    (line,) = caplog.messages
    assert line.endswith("has no task slots yet: the job waits until task managers with 4 have started")


def test_versions_of_a_users_job_server_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    for given in ("--job_endpoint=jobs:8099", "--flink_job_server_jar=/jars/mine.jar"):
        with local_job_server("flink", [given]) as endpoint:
            assert endpoint is None
        (line,) = caplog.messages
        caplog.clear()
        assert line.endswith(f"are unknown, and not compared with Beam {beam.__version__} here")


def test_job_server_by_file_must_have_the_clusters_flink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    jar = tmp_path / "beam-runners-flink-1.20-job-server-2.65.0.jar"
    jar.touch()
    with cluster(config("1.19.3")) as address:
        reason = f"{address} has Flink '1.19.3'; beam-runners-flink-1.20-job-server-2.65.0.jar is of Beam 2.65.0 for"
        with pytest.raises(UnsupportedFlink, match=f"{reason} Flink 1.20: use a cluster of Flink 1.20"):
            run_pipeline(lambda pipeline: None, "flink", [f"--flink_master={address}", f"--flink_job_server_jar={jar}"])
    caplog.clear()
    with cluster(config("1.20.1")) as address:
        check_own_server(address, str(jar))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("server_flink", "server_beam"), [("1.20", "2.65.0"), (FLINK, "2.65.0"), ("2.2", BEAM), ("2.2", beam.__version__)]
)
def test_job_server_of_an_untested_pair_is_refused(
    server_flink: str, server_beam: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jar = f"beam-runners-flink-{server_flink}-job-server-{server_beam}.jar"
    with pytest.raises(UnsupportedFlink) as refused:
        local_job_server("flink", [f"--flink_job_server_jar=/jars/{jar}"])
    reason = f"{jar} is of Beam {server_beam} for Flink {server_flink}, the pipeline is of Beam {beam.__version__}: "
    assert str(refused.value).startswith(reason)
    assert str(refused.value).endswith(f"set {ALLOW_UNTESTED}=1")
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    with local_job_server("flink", [f"--flink_job_server_jar=/jars/{jar}"]):
        pass
    (line,) = caplog.messages
    assert line.startswith(reason)


def test_job_server_of_the_tested_pair_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    with local_job_server("flink", [f"--flink_job_server_jar=/jars/beam-runners-flink-{FLINK}-job-server-{BEAM}.jar"]):
        pass
    assert not caplog.messages


@pytest.mark.parametrize("jar", [None, "/jars/mine.jar"])
def test_untested_flink_of_an_own_server_is_refused(
    jar: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever Beam the job server is of."""
    with cluster(config("1.19.2")) as address:
        check_own_server(address, jar)
    with cluster(config("1.14.6")) as address:
        reason = f"the cluster at {address} has Flink '1.14.6', the pipeline is of Beam {beam.__version__}: this pair"
        with pytest.raises(UnsupportedFlink, match=f"{reason} .*set {ALLOW_UNTESTED}=1"):
            check_own_server(address, jar)
        assert not caplog.messages
        monkeypatch.setenv(ALLOW_UNTESTED, "1")
        check_own_server(address, jar)
    untested, unpublished = caplog.messages
    assert untested.startswith(reason)
    assert f"Beam {beam.__version__} has job servers for Flink 1.19, " in unpublished


@pytest.mark.parametrize(
    ("managers", "given", "workers", "warned"),
    [
        ([1, 1], "", 1, ""),
        ([1, 4], "", 4, "up to 4 slots, and 4 workers each"),
        ([4], "--sdk_worker_parallelism=2", 2, "or set --sdk_worker_parallelism=4"),
        ([4], "--environment_type=LOOPBACK", 1, ""),
        ([], "", 1, ""),
    ],
)
def test_flink_job_has_as_many_workers_as_slots(
    managers: list[int],
    given: str,
    workers: int,
    warned: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The workers of each task manager; steps in the submitting process have none."""
    jobs: list[PipelineOptions] = []
    monkeypatch.setattr(flink_jobs, "_APPEARS_S", 0.0)
    monkeypatch.setattr(run, "wait_for_job_server", lambda options: jobs.append(options))  # the job is not submitted
    with cluster(config(FLINK), overview(4, 4), managers) as address:
        own = [f"--flink_master={address}", "--job_endpoint=localhost:1", "--environment_type=EXTERNAL"]
        run_pipeline(lambda pipeline: None, "flink", [*own, *given.split()])
    (options,) = jobs
    assert int(options.view_as(PortableOptions).sdk_worker_parallelism) == workers
    lines = [line for line in caplog.messages if "workers" in line]
    assert [warned in line for line in lines] == [True] * bool(warned)


@pytest.mark.parametrize("more", ["", " --job_endpoint=jobs:8099", " --flink_job_server_jar=mine.jar"])
def test_flink_version_is_rejected_as_it_has_no_effect(more: str) -> None:
    with pytest.raises(UnsupportedFlink, match="--flink_version has no effect"):
        local_job_server("flink", f"--flink_version=2.0{more}".split())


def test_document_lists_the_pairs_of_beam_and_flink() -> None:
    text = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text()
    assert f"| {BEAM} | {FLINK} |" in text
    assert f"| {beam.__version__} | {', '.join(FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS)} |" in text


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[]", b'{"flink-version"', b"1" * 100_000])
def test_server_that_is_no_flink_is_rejected(body: bytes) -> None:
    with cluster(body) as address, pytest.raises(UnsupportedFlink, match="no Flink responds"):
        check_cluster(address)


def test_pipeline_for_an_unresponsive_cluster_is_rejected() -> None:
    master = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnsupportedFlink, match=f"no Flink responds at http://{master}/config .*refused"):
        run_pipeline(lambda pipeline: None, "flink", [f"--flink_master={master}"])
    with pytest.raises(UnsupportedFlink), running_flink(master=master):
        pass
