"""Several roles as branches of one pipeline: one source reads the topics of all, see `operators.io.read_branches`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

import apache_beam as beam

from operators.io.branch_polls import BranchShard
from operators.io.config import ShardConfig
from operators.io.read_branches import Branch, Build, ReadBranches
from operators.io.read_topics import ReadTopics


def build_branches(pipeline: beam.Pipeline, builds: Mapping[str, Build]) -> None:
    """Add the graphs of `builds`, by the name of their role, to `pipeline`. Raises what they raise."""
    shards = [BranchShard(name, shard) for name, build in builds.items() for shard in shards_of(build)]
    polls = pipeline | "read all topics" >> ReadBranches(shards)
    for name, build in builds.items():
        polls[name] | name >> Branch(build)


def shards_of(build: Build) -> Sequence[ShardConfig]:
    """The shards that the graph of `build` reads. The graph is built, not run."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)  # Beam removes it in `run` only
    build(pipeline)
    reading = [part.transform for part in pipeline.transforms_stack[0].parts if isinstance(part.transform, ReadTopics)]
    return [shard for each in reading for shard in each.shards]
