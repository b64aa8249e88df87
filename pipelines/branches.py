"""Several roles in one pipeline: as branches after one source that reads the topics of all, or side by side."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

import apache_beam as beam
from apache_beam.pipeline import AppliedPTransform

from operators.io.branch_polls import BranchShard
from operators.io.config import ShardConfig
from operators.io.read_branches import Branch, Build, ReadBranches, Whole
from operators.io.read_topics import sources_of


def build_branches(pipeline: beam.Pipeline, builds: Mapping[str, Build]) -> None:
    """Add the graphs of `builds`, by the name of their role, to `pipeline`. Raises what they raise."""
    shards = [BranchShard(name, shard) for name, build in builds.items() for shard in shards_of(build)]
    polls = pipeline | "read all topics" >> ReadBranches(shards)
    for name, build in builds.items():
        polls[name] | name >> Branch(build)


def build_side_by_side(pipeline: beam.Pipeline, builds: Mapping[str, Build]) -> None:
    """As `build_branches`, with a source for each role: for runners that run several sources at a time."""
    for name, build in builds.items():
        pipeline | name >> Whole(build)


def shards_of(build: Build) -> Sequence[ShardConfig]:
    """The shards that the graph of `build` reads. The graph is built, not run."""
    return [shard for each in sources_of(built(build)) for shard in each.shards]


def built(build: Build) -> AppliedPTransform:
    """The whole graph of `build`, which is not run. Raises what it raises."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)  # Beam removes it in `run` only
    build(pipeline)
    return pipeline.transforms_stack[0]
