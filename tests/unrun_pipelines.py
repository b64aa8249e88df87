"""Pipelines that a test builds and never runs."""

from __future__ import annotations

import shutil

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions


def unrun_pipeline(*options: str) -> beam.Pipeline:
    """A pipeline without transforms, for the embedded runner if `options` name no other."""
    runner = () if any(each.startswith("--runner=") for each in options) else ("--runner=FnApiRunner",)
    pipeline = beam.Pipeline(options=PipelineOptions([*runner, *options]))
    shutil.rmtree(pipeline.local_tempdir)  # Beam removes it in `run` only
    return pipeline
