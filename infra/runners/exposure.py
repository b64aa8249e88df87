"""Rejects Beam options that would open ports to other machines or run unverified code, with advice in the error.

Beam's gRPC servers have no authentication, and a client that reaches one can run code in its process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apache_beam.options.pipeline_options import (
    DirectOptions,
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    StandardOptions,
)

from infra.listening import host_of, is_loopback
from infra.runners.local_server import reject_exposed_server
from infra.runners.options import RunnerName, pipeline_options

LOCAL_MASTERS = ("[local]", "[auto]")
_IN_MEMORY = "in_memory"


class ExposedOptions(ValueError):
    """Beam options that would let other machines run code here."""


def reject_exposed_options(runner: RunnerName, options: Sequence[str]) -> None:
    """Raise ExposedOptions if `options`, all options for Beam, open more than loopback or download unverified code."""
    read = PipelineOptions(list(options))
    expected = PipelineOptions(pipeline_options(runner)).view_as(StandardOptions).runner
    chosen, portable = read.view_as(StandardOptions).runner, read.view_as(PortableOptions)
    if chosen != expected:
        raise ExposedOptions(f"--runner={chosen} after `--` is not supported: choose one by --runner before it")
    if runner == "embedded":
        _reject_embedded(read, portable)
        return
    if portable.job_endpoint == "embed":
        raise ExposedOptions("--job_endpoint=embed opens Beam's servers on all interfaces: use --runner embedded")
    if portable.environment_type == "LOOPBACK":
        _reject_remote(read, portable)
    _reject_downloads(read)
    if read.view_as(FlinkRunnerOptions).flink_job_server_jar:
        reject_exposed_server("--flink_job_server_jar", ["0.0.0.0"])


def _reject_embedded(read: PipelineOptions, portable: PortableOptions) -> None:
    mode = read.view_as(DirectOptions).direct_running_mode
    if mode != _IN_MEMORY:
        raise ExposedOptions(f"--direct_running_mode={mode} opens Beam's servers on all interfaces: leave it out")
    if portable.environment_type:
        raise ExposedOptions(
            f"--environment_type={portable.environment_type} makes the embedded runner open Beam's servers on all "
            "interfaces: leave it out, or choose --runner prism, flink or portable"
        )


def _reject_remote(read: PipelineOptions, portable: PortableOptions) -> None:
    """The steps run in this process, at a loopback port, so the runner must be on this machine, too."""
    values = {"--job_endpoint": portable.job_endpoint, "--flink_master": read.view_as(FlinkRunnerOptions).flink_master}
    for name, value in values.items():
        if value and value not in LOCAL_MASTERS and not is_loopback(host_of(value)):
            raise ExposedOptions(
                f"{name}={value} is another machine, whose workers cannot connect to steps in this process: those "
                "listen on loopback, since Beam's worker pool has no authentication. Start worker pools on the "
                "machines of that runner's workers and give --environment_type=EXTERNAL "
                "--environment_config=localhost:PORT (or DOCKER with an image of this environment)"
            )


def _reject_downloads(read: PipelineOptions) -> None:
    files = {
        "--prism_location": read.view_as(PrismRunnerOptions).prism_location,
        "--flink_job_server_jar": read.view_as(FlinkRunnerOptions).flink_job_server_jar,
    }
    for name, value in files.items():
        if value and not Path(value).is_file():
            raise ExposedOptions(f"{name}={value} is not a local file: Beam would download and run it unverified")
