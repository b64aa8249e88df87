"""Beam options that would open ports to other machines, or run code that nobody has checked: refused, with the way out.

Beam's gRPC servers ask nobody who they are, and what reaches them can run code in their process.
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
from infra.runners.options import Runner, pipeline_options

LOCAL_MASTERS = ("[local]", "[auto]")
_IN_MEMORY = "in_memory"


class ExposedOptions(ValueError):
    """Beam options with which strangers could run code here."""


def reject_exposed_options(runner: Runner, options: Sequence[str]) -> None:
    """Raise ExposedOptions where `options`, all that Beam is given, open more than loopback or fetch unchecked code."""
    read = PipelineOptions(list(options))
    own = PipelineOptions(pipeline_options(runner)).view_as(StandardOptions).runner
    chosen, portable = read.view_as(StandardOptions).runner, read.view_as(PortableOptions)
    if chosen != own:
        raise ExposedOptions(f"--runner={chosen} after `--` is not supported: choose one by --runner before it")
    if runner == "embedded":
        _refuse_embedded(read, portable)
        return
    if portable.job_endpoint == "embed":
        raise ExposedOptions("--job_endpoint=embed opens Beam's servers on all interfaces: use --runner embedded")
    if portable.environment_type == "LOOPBACK":
        _refuse_remote(read, portable)
    _refuse_downloads(read)
    if read.view_as(FlinkRunnerOptions).flink_job_server_jar:
        reject_exposed_server("--flink_job_server_jar", ["0.0.0.0"])


def _refuse_embedded(read: PipelineOptions, portable: PortableOptions) -> None:
    mode = read.view_as(DirectOptions).direct_running_mode
    if mode != _IN_MEMORY:
        raise ExposedOptions(f"--direct_running_mode={mode} opens Beam's servers on all interfaces: leave it out")
    if portable.environment_type:
        raise ExposedOptions(
            f"--environment_type={portable.environment_type} makes the embedded runner open Beam's servers on all "
            "interfaces: leave it out, or choose --runner prism, flink or portable"
        )


def _refuse_remote(read: PipelineOptions, portable: PortableOptions) -> None:
    """Steps run in this process, at a port on loopback: the runner must be on this machine, too."""
    places = {"--job_endpoint": portable.job_endpoint, "--flink_master": read.view_as(FlinkRunnerOptions).flink_master}
    for name, place in places.items():
        if place and place not in LOCAL_MASTERS and not is_loopback(host_of(place)):
            raise ExposedOptions(
                f"{name}={place} is another machine, whose workers cannot reach steps that run in this process: they "
                "listen on loopback, since Beam's worker pool has no authentication. Start worker pools where that "
                "runner's workers are and give --environment_type=EXTERNAL --environment_config=localhost:PORT (or "
                "DOCKER with an image of this environment)"
            )


def _refuse_downloads(read: PipelineOptions) -> None:
    files = {
        "--prism_location": read.view_as(PrismRunnerOptions).prism_location,
        "--flink_job_server_jar": read.view_as(FlinkRunnerOptions).flink_job_server_jar,
    }
    for name, place in files.items():
        if place and not Path(place).is_file():
            raise ExposedOptions(f"{name}={place} is no file: Beam would fetch and run it unchecked; give a local file")
