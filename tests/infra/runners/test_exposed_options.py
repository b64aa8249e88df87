"""Beam options that would let other machines run code here are rejected before a port is opened."""

from __future__ import annotations

import pytest

from infra.runners.exposure import ExposedOptions, reject_exposed_options
from infra.runners.options import RUNNERS, RunnerName, pipeline_options
from infra.runners.run import run_pipeline


@pytest.mark.parametrize("runner", RUNNERS)
def test_default_options_are_accepted(runner: RunnerName) -> None:
    reject_exposed_options(runner, pipeline_options(runner))


@pytest.mark.parametrize(
    ("runner", "option"),
    [
        ("portable", "--job_endpoint=localhost:8099"),
        ("flink", "--job_endpoint=[::1]:8099"),
        ("flink", "--flink_master=http://127.0.0.1:8081/"),
        ("portable", "--environment_type=EXTERNAL --environment_config=pool:5000 --job_endpoint=far:8099"),
    ],
)
def test_options_of_this_machine_are_accepted(runner: RunnerName, option: str) -> None:
    reject_exposed_options(runner, pipeline_options(runner, option.split()))


@pytest.mark.parametrize(
    ("runner", "option", "why"),
    [
        ("embedded", "--direct_running_mode=multi_processing", "opens Beam's servers on all interfaces"),
        ("embedded", "--direct_running_mode=multi_threading", "opens Beam's servers on all interfaces"),
        ("embedded", "--environment_type=PROCESS", "open Beam's servers on all interfaces"),
        ("embedded", "--runner=FlinkRunner", "choose one by --runner before it"),
        ("portable", "--job_endpoint=embed", "opens Beam's servers on all interfaces"),
        ("portable", "--job_endpoint=far:8099", "is another machine"),
        ("flink", "--flink_master=flink-jobmanager:8081", "is another machine"),
        ("prism", "--prism_location=v2.77.0", "is not a local file"),
        ("flink", "--flink_job_server_jar=https://elsewhere.invalid/a.jar", "is not a local file"),
    ],
)
def test_options_that_expose_ports_are_rejected(runner: RunnerName, option: str, why: str) -> None:
    with pytest.raises(ExposedOptions, match=why):
        run_pipeline(lambda pipeline: pytest.fail("built"), runner, [option])
