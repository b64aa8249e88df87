"""The worker pool of a portable job: it listens on loopback and ends with the job."""

from __future__ import annotations

import socket

import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from infra.listening import exposed_addresses, listening_sockets
from infra.runners.options import Runner, pipeline_options
from infra.runners.worker_pool import local_worker_pool


@pytest.mark.parametrize("runner", ["prism", "flink", "portable"])
def test_worker_pool_listens_on_loopback_and_ends_with_its_job(runner: Runner) -> None:
    before = listening_sockets([psutil.Process()])
    with local_worker_pool(pipeline_options(runner)) as options:
        opened = listening_sockets([psutil.Process()]) - before
        read = PipelineOptions(options).view_as(PortableOptions)
    assert (len(opened), exposed_addresses(opened)) == (1, [])
    [(host, port)] = opened
    assert (read.environment_type, read.environment_config) == ("EXTERNAL", f"{host}:{port}")
    with socket.socket() as probe:
        assert probe.connect_ex((host, port)) != 0


def test_worker_pool_is_not_started_for_a_user_environment() -> None:
    before = listening_sockets([psutil.Process()])
    options = pipeline_options("portable", ["--environment_type=EXTERNAL", "--environment_config=pool:50000"])
    with local_worker_pool(options) as unchanged:
        assert unchanged == options
        assert listening_sockets([psutil.Process()]) == before


def test_exposed_addresses_has_sockets_of_all_interfaces() -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all, socket.create_server(("127.0.0.1", 0)) as loopback:
        found = listening_sockets([psutil.Process()])
        assert loopback.getsockname() in found
        assert exposed_addresses(found) == [f"0.0.0.0:{open_to_all.getsockname()[1]}"]
