"""Decisions of placement and emissions of any outputs, for tests of the steps after a fold."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import apache_beam as beam
from apache_beam.testing.test_pipeline import TestPipeline
from apache_beam.testing.util import assert_that, equal_to
from record_factories import prompt, version

from operators.io.elements import Checkpoint, Emission, PartitionKey
from operators.io.repartition import Moved, Placed
from schemas.columns import flags, floats, token_ids
from schemas.records import Assignment, KVManifest, Release, Response, VersionSpan

CHECKPOINT = Checkpoint({PartitionKey("prompts", 0): 7}, 1, {"lease": 3})


def placed(number: int, replica: int, lease: int = 1, incarnation: int = 1, tokens: int = 0, **changes: Any) -> Placed:
    assignment = Assignment(
        prompt(number),
        member=0,
        lease=lease,
        attempt=1,
        replica=replica,
        incarnation=incarnation,
        policy_version=version(0) if tokens else None,
        partial=response(tokens) if tokens else None,
        assigned_at=5,
        version_spans=(VersionSpan(version(0), tokens),) if tokens else (),
    )
    return Placed(replace(assignment, **changes), "resume" if tokens else "dispatch")


def moved(*names: str, source: int = 0, incarnation: int = 1, to: int = 1) -> Moved:
    return Moved(Release("1-1.1", names, tuple(range(9, 9 + len(names))), to, 1, source, incarnation), "repack")


@cache
def kv(checksums: int) -> KVManifest:
    return KVManifest("host:1", "secret", version(0), 3, checksums * 8, 8, (1,) * checksums)


@cache
def response(tokens: int) -> Response:
    return Response(token_ids([5] * tokens), floats([-0.5] * tokens), flags([True] * tokens))


def assert_maps(step: beam.PTransform, outputs: list[Any], expected: list[Any]) -> None:
    """Assert that `step` turns an emission with `outputs` into one with `expected`, of the same start and number."""
    with TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder), TestPipeline() as pipeline:
        mapped = pipeline | beam.Create([Emission("group", 4, 2, tuple(outputs), CHECKPOINT)]) | step
        assert_that(mapped, equal_to([Emission("group", 4, 2, tuple(expected), CHECKPOINT)]))
