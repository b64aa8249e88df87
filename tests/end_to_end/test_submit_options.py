"""`laminar submit --runner flink -- ...`: the job server receives the pipeline, Laminar's options and the user's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tomli_w
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc
from fake_flink import fake_flink
from laminar_runs import Command, CommandServer
from small_runs import SMALL

from infra.kafka.broker import Broker, free_port

REFUSAL = "no jobs today"
FLINK_OPTIONS = ("checkpointing_interval", "max_bundle_size", "max_bundle_time_mills", "number_of_execution_retries")


class RefusingJobServer(beam_job_api_pb2_grpc.JobServiceServicer):
    """Records the jobs that it is requested to prepare, and rejects them."""

    def __init__(self) -> None:
        self.requests: list[beam_job_api_pb2.PrepareJobRequest] = []
        self.port = 0

    def DescribePipelineOptions(self, request: Any, context: Any) -> Any:
        """Options that Beam for Python learns only from a Flink job server."""
        described = [beam_job_api_pb2.PipelineOptionDescriptor(name=name) for name in FLINK_OPTIONS]
        return beam_job_api_pb2.DescribePipelineOptionsResponse(options=described)

    def Prepare(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, REFUSAL)


@pytest.fixture
def job_server() -> Iterator[RefusingJobServer]:
    server, jobs = grpc.server(ThreadPoolExecutor(2)), RefusingJobServer()
    beam_job_api_pb2_grpc.add_JobServiceServicer_to_server(jobs, server)
    jobs.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield jobs
    server.stop(None).wait()


@pytest.fixture
def file(broker: Broker, model_folder: Path, run_id: str, tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    settings = {"run": {"name": run_id}, "kafka": {"bootstrap_servers": broker.bootstrap_servers}}
    file.write_text(tomli_w.dumps({**SMALL, **settings, "model": {"path": str(model_folder)}}))
    return file


@pytest.mark.parametrize(
    ("endpoint_kind", "runner"), [("nothing", "flink"), ("another", "portable"), ("no host", "portable")]
)
def test_submit_names_an_unreachable_endpoint(
    endpoint_kind: str, runner: str, command_server: CommandServer, broker: Broker, file: Path, tmp_path: Path
) -> None:
    """No server listens there, or another server does, or the host does not exist."""
    endpoint = {
        "nothing": f"127.0.0.1:{free_port()}",
        "another": broker.bootstrap_servers,
        "no host": "nowhere.invalid:8099",
    }[endpoint_kind]
    user_options = [f"--job_endpoint={endpoint}", "--job_server_timeout=1"]
    if endpoint_kind == "no host":  # on another machine, whose workers the user starts
        user_options += ["--environment_type=EXTERNAL", "--environment_config=localhost:50000"]
    command = Command(command_server, tmp_path, "submit", "score", str(file), "--runner", runner, "--", *user_options)
    try:
        assert command.wait(60) == 1
    finally:
        command.clean_up()
    last_line = command.output().splitlines()[-1]
    assert last_line.startswith(f"laminar: no job server responds at {endpoint} after 1 s: ")


def test_submit_passes_options_to_the_job_server(
    job_server: RefusingJobServer, command_server: CommandServer, file: Path, tmp_path: Path
) -> None:
    endpoint = f"--job_endpoint=127.0.0.1:{job_server.port}"
    with fake_flink() as flink:
        user_options = (f"--flink_master={flink.address}", "--checkpointing_interval=9000", endpoint)
        command = Command(
            command_server, tmp_path, "submit", "placement", str(file), "--runner", "flink", "--", *user_options
        )
        try:
            assert command.wait(60) == 1
        finally:
            command.clean_up()
    assert REFUSAL in command.output().splitlines()[-1]
    (request,) = job_server.requests
    steps = {step.unique_name for step in request.pipeline.components.transforms.values()}
    assert {
        "read work and replicas",
        "track and decide",
        "repartition trajectories",
        "write inboxes, dead letters",
    } <= steps
    options = {name.split(":")[2]: value for name, value in request.pipeline_options.items()}
    assert options["flink_master"] == flink.address
    assert options["checkpointing_interval"] == "9000"  # the user's value, not the default
    assert (options["max_bundle_size"], options["max_bundle_time_mills"], options["streaming"]) == ("100", "20", True)
