"""The options of Flink's job server that Laminar sets, declared for Beam's Python side.

Beam sends a job server the options that it describes, and warns of each that no class here declares, as if it were
lost: `Unparseable argument: --checkpointing_interval=1000`.
"""

from __future__ import annotations

from argparse import ArgumentParser

from apache_beam.options.pipeline_options import PipelineOptions


class FlinkJobOptions(PipelineOptions):
    """Options of a streaming job, see `org.apache.beam.runners.flink.FlinkPipelineOptions`."""

    @classmethod
    def _add_argparse_args(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--checkpointing_interval", type=int, help="Milliseconds between two checkpoints.")
        parser.add_argument("--max_bundle_time_mills", type=int, help="Milliseconds that a bundle may last.")
        parser.add_argument("--max_bundle_size", type=int, help="Elements that a bundle may have.")
        parser.add_argument("--number_of_execution_retries", type=int, help="Restarts before the job fails.")
        parser.add_argument("--execution_retry_delay", type=int, help="Milliseconds between two restarts.")
