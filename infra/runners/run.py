"""Runs one pipeline until it ends or a stop is requested."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
)
from apache_beam.runners.runner import PipelineResult, PipelineState

from infra.runners import worker
from infra.runners.exposure import reject_exposed_options
from infra.runners.flink_jobs import EMBEDDED, UnsupportedFlink, numbered
from infra.runners.garbage_collection import reduce_gc_frequency
from infra.runners.liveness import LIVENESS
from infra.runners.local_server import wait_for_job_server
from infra.runners.options import FLINK_VERSION_UNUSED, RunnerName, option_names, pipeline_options
from infra.runners.stopping import STOPPING, stopping_on_signals
from infra.runners.thread_switches import switch_threads_sooner
from infra.runners.worker_pool import local_worker_pool
from infra.scratch import scratch_folder

log = logging.getLogger(__name__)

BEAM_FOLDERS = "laminar-pipeline-"
"""Prefix of the temporary folder in which Beam has its own while a pipeline runs."""
DRAIN_S = 4.0
"""Seconds for a job whose steps run in this process to end by itself before it is cancelled."""


OptionsView = TypeVar("OptionsView", bound=PipelineOptions)


class FlinkJobOptions(PipelineOptions):
    """The options of Flink's job server that Laminar sets, see `org.apache.beam.runners.flink.FlinkPipelineOptions`.

    Beam sends a job server the options that it describes, and warns of each that no class here declares, as if it were
    lost: `Unparseable argument: --checkpointing_interval=1000`.

    Views are kept: Beam requests 70 while it builds and runs a pipeline, and each parses the arguments again.
    """

    def view_as(self, cls: type[OptionsView]) -> OptionsView:
        views: dict[type, PipelineOptions] = self.__dict__.setdefault("_views", {})  # attributes are options
        if cls not in views:
            views[cls] = super().view_as(cls)
        return cast("OptionsView", views[cls])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_views"}

    @classmethod
    def _add_argparse_args(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--checkpointing_interval", type=int, help="Milliseconds between two checkpoints.")
        parser.add_argument("--max_bundle_time_mills", type=int, help="Milliseconds that a bundle may last.")
        parser.add_argument("--max_bundle_size", type=int, help="Elements that a bundle may have.")
        parser.add_argument("--number_of_execution_retries", type=int, help="Restarts before the job fails.")
        parser.add_argument("--execution_retry_delay", type=int, help="Milliseconds between two restarts.")


def run_pipeline(
    build: Callable[[beam.Pipeline], None],
    runner: RunnerName = "embedded",
    beam_options: Sequence[str] = (),
    close: Callable[[], None] = lambda: None,
) -> None:
    """Build a pipeline and run it to its end; SIGTERM, SIGINT and `STOPPING` make its sources finish and drain.

    `beam_options` override the defaults for `runner`. `close` is called when the pipeline has stopped for any reason
    and releases what the steps opened in this process. On a Flink cluster at `--flink_master` the job is cancelled
    then, and before it those of earlier submissions with the same `--job_name`. Raises the error of a failed pipeline,
    NoJobServer, UnsupportedFlink, ExposedOptions for options that would let other machines run code here, and
    ValueError for an unknown runner.
    """
    reduce_gc_frequency()
    switch_threads_sooner()
    with stopping_on_signals(), scratch_folder(BEAM_FOLDERS) as folder:
        try:
            with _options(runner, beam_options) as named:
                options, elsewhere = FlinkJobOptions(named), _has_steps_elsewhere(runner, beam_options)
                if not wait_for_job_server(options):
                    return
                with _temporary_files_in(folder):  # Beam's folder for it, which only `run` removes
                    pipeline = beam.Pipeline(options=options)
                build(pipeline)
                # Beam never removes the folders that it makes for the artifacts of a submission.
                with nullcontext() if runner == "embedded" else _temporary_files_in(folder):
                    result = pipeline.run()
                if elsewhere:
                    LIVENESS.set_steps_elsewhere()
                _wait_until_finish(result, 0.0 if elsewhere else DRAIN_S)
            if elsewhere:
                time.sleep(worker.DRAIN_S + worker.CLOSE_S)  # workers commit their last outputs after the job's end
        finally:
            close()


@contextmanager
def _options(runner: RunnerName, beam_options: Sequence[str]) -> Iterator[list[str]]:
    options = pipeline_options(runner, beam_options)
    if runner == "flink":
        given = PipelineOptions(options).view_as(GoogleCloudOptions).job_name
        options.append(f"--job_name={numbered(given or f'laminar-{uuid.uuid4().hex[:12]}')}")  # the last is used
    reject_exposed_options(runner, options)
    with local_job_server(runner, options) as endpoint:
        named = [*options, *([f"--job_endpoint={endpoint}"] if endpoint else []), *_worker_options(runner, options)]
        with local_worker_pool(named) as complete:
            yield complete


def _worker_options(runner: RunnerName, options: Sequence[str]) -> list[str]:
    """The number of workers of a task manager, if the steps run beside those of a Flink cluster whose address is known.

    Raises UnsupportedFlink, and ValueError for a given number that is none.
    """
    read = PipelineOptions(list(options))
    master = read.view_as(FlinkRunnerOptions).flink_master
    if runner != "flink" or master in EMBEDDED or not _has_steps_elsewhere(runner, options):
        return []
    from infra.runners.flink import workers_for_slots

    given = int(read.view_as(PortableOptions).sdk_worker_parallelism)
    return workers_for_slots(master, given if "sdk_worker_parallelism" in option_names(options) else None)


def _has_steps_elsewhere(runner: RunnerName, beam_options: Sequence[str]) -> bool:
    options = PipelineOptions(pipeline_options(runner, beam_options))
    return options.view_as(PortableOptions).environment_type not in (None, "LOOPBACK")


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def local_job_server(runner: RunnerName, options: Sequence[str]) -> AbstractContextManager[str | None]:
    """Run a job server on this machine if `runner` needs one and `options` name none; its endpoint, else None.

    `--prism_location` names the binary of Prism, `--flink_master` the cluster to which the job server submits, and
    which cancels the job with the name `--job_name` in the end. Raises UnsupportedFlink for `--flink_version`.
    """
    named = option_names(options)
    read = PipelineOptions(list(options))
    # imported here, since these modules are slow to import
    if runner == "prism" and "job_endpoint" not in named:
        from infra.runners.prism import running_prism

        return running_prism(read.view_as(PrismRunnerOptions).prism_location)
    if runner != "flink":
        return nullcontext()
    if "flink_version" in named:
        raise UnsupportedFlink(FLINK_VERSION_UNUSED)
    flink, job = read.view_as(FlinkRunnerOptions), read.view_as(GoogleCloudOptions).job_name or ""
    if not {"job_endpoint", "flink_job_server_jar"} & named:
        from infra.runners.flink import running_flink

        return running_flink(log.info, flink.flink_master, flink.parallelism, job)
    from infra.runners.flink import check_job_server, check_own_server, slots_for

    check_job_server(flink.flink_job_server_jar)
    if flink.flink_master not in EMBEDDED:
        check_own_server(flink.flink_master, flink.flink_job_server_jar)
        return slots_for(flink.flink_master, flink.parallelism, job)
    return _job_of_unknown_cluster(job) if _has_steps_elsewhere(runner, options) else nullcontext()


@contextmanager
def _job_of_unknown_cluster(job: str) -> Iterator[None]:
    yield
    if STOPPING.is_set():
        log.error(
            "job %s may run on: a job server does not cancel a job of a Flink cluster. Cancel it in Flink, or name the "
            "cluster's REST interface by --flink_master beside --job_endpoint, and each stop does",
            job,
        )


def _wait_until_finish(result: PipelineResult, drain_s: float) -> None:
    # If the steps run in this process, their sources see STOPPING and the job ends by itself within `drain_s`.
    ended = threading.Event()
    arguments = (result, ended, drain_s)
    threading.Thread(target=_cancel_when_stopping, args=arguments, name="canceller", daemon=True).start()
    try:
        result.wait_until_finish()
    except RuntimeError:
        if not STOPPING.is_set() or result.state != PipelineState.CANCELLED:
            raise
    finally:
        ended.set()


def _cancel_when_stopping(result: PipelineResult, ended: threading.Event, drain_s: float) -> None:
    STOPPING.wait()
    if not ended.wait(drain_s):
        result.cancel()
