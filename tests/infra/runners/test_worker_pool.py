"""The worker pool of a portable job: it listens on loopback and ends with the job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_fn_api_pb2 as fn_api
from apache_beam.portability.api import beam_fn_api_pb2_grpc

from infra.listening import exposed_addresses, listening_sockets
from infra.runners import worker_pool
from infra.runners.liveness import EXIT_CODE
from infra.runners.options import RunnerName, pipeline_options
from infra.runners.worker import CLOSE_S, DRAIN_S
from infra.runners.worker_pool import WorkerProcesses, local_worker_pool


@pytest.mark.parametrize("runner", ["prism", "flink", "portable"])
def test_worker_pool_listens_on_loopback_and_ends_with_its_job(runner: RunnerName) -> None:
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


def test_worker_processes_end_with_their_pool() -> None:
    """Two task managers give the same number to their workers: both run, and none outlives a killed pool."""
    command = [sys.executable, "-W", "ignore", "-m", "infra.runners.worker_pool", "0"]
    with socket.create_server(("127.0.0.1", 0)) as runner, subprocess.Popen(command, stdout=subprocess.PIPE) as pool:
        assert pool.stdout is not None
        found = re.search(rb"--environment_config=localhost:(\d+)", pool.stdout.readline())
        assert found is not None
        assert not exposed_addresses(listening_sockets([psutil.Process(pool.pid)]))
        request = fn_api.StartWorkerRequest(worker_id="1-1")
        request.control_endpoint.url = f"127.0.0.1:{runner.getsockname()[1]}"
        with grpc.insecure_channel(f"127.0.0.1:{int(found[1])}") as channel:
            stub = beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(channel)
            for _ in range(2):
                stub.StartWorker(request)
                runner.accept()[0].close()  # the worker has connected to its runner
        workers = psutil.Process(pool.pid).children(recursive=True)
        os.kill(pool.pid, signal.SIGKILL)
        pool.wait()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, 30)
    assert not alive


class _Runner(beam_fn_api_pb2_grpc.BeamFnControlServicer):
    """A runner that sends a worker no work, and ends the connection when `ended` is set."""

    def __init__(self) -> None:
        self.connected, self.ended = threading.Event(), threading.Event()

    def Control(self, replies: object, context: object) -> Iterator[fn_api.InstructionRequest]:
        self.connected.set()
        self.ended.wait(60)
        yield from ()


@contextmanager
def worker(before: str) -> Iterator[tuple[_Runner, subprocess.Popen[str]]]:
    """A worker that executes `before` and then connects to a runner."""
    runner, server = _Runner(), grpc.server(ThreadPoolExecutor(4))
    beam_fn_api_pb2_grpc.add_BeamFnControlServicer_to_server(runner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    program = f"{before}\nfrom infra.runners.worker import main\nmain('127.0.0.1:{port}', '1-1')"
    try:
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
            yield runner, process
            process.kill()
    finally:
        runner.ended.set()
        server.stop(1).wait()


def test_worker_pool_waits_for_its_workers_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping, waited, wait = threading.Event(), list[int | None](), WorkerProcesses.wait
    stopping.set()
    monkeypatch.setattr(worker_pool, "STOPPING", stopping)
    monkeypatch.setattr(worker_pool, "stop_on_signals", lambda: None)

    def wait_with_a_worker(pool: WorkerProcesses, timeout_s: float) -> None:
        assert timeout_s > DRAIN_S + CLOSE_S
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"]) as process:
            pool._running.append(process)
            wait(pool, 60)
            waited.append(process.returncode)

    monkeypatch.setattr(WorkerProcesses, "wait", wait_with_a_worker)
    worker_pool.main(0)
    assert waited == [0]


def test_worker_process_exits_when_a_step_exceeds_its_budget() -> None:
    step = (
        "from infra.runners.liveness import LIVENESS, StepBudget\n"
        "LIVENESS.set_budget('g', StepBudget(fold_s=0.0, setting='progress.score_s'))\n"
        "step = LIVENESS.step('g', 'fold')\nstep.__enter__()"
    )
    with worker(step) as (_, process):
        _, log = process.communicate(timeout=60)
        assert process.returncode == EXIT_CODE
    assert "raise progress.score_s if such a step may take longer; this process exits" in log


def test_worker_process_closes_its_shards_after_its_job() -> None:
    closing = (
        "from infra.runners.stopping import AT_END, STOPPING\n"
        "AT_END.add(lambda: print('closed after', STOPPING.is_set(), file=__import__('sys').stderr, flush=True))"
    )
    with worker(closing) as (runner, process):
        assert runner.connected.wait(60)
        assert process.poll() is None
        runner.ended.set()
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "closed after True" in log


def test_worker_process_exits_when_its_drain_fails() -> None:
    failing = (
        "import threading, time\nfrom infra.runners import worker\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "worker.drain = lambda: 1 / 0"
    )
    with worker(failing) as (runner, process):
        runner.ended.set()
        _, log = process.communicate(timeout=60)
    assert "the last outputs may be lost" in log


def test_exposed_addresses_has_sockets_of_all_interfaces() -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all, socket.create_server(("127.0.0.1", 0)) as loopback:
        found = listening_sockets([psutil.Process()])
        assert loopback.getsockname() in found
        exposed = exposed_addresses(found)  # other tests of this process may have opened more
        assert f"0.0.0.0:{open_to_all.getsockname()[1]}" in exposed
        assert f"127.0.0.1:{loopback.getsockname()[1]}" not in exposed
