"""The weight version and the replicas of the tests of stage groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from staged_replicas import Replica, Replicas, Version

    from operators.rollout.engine import Completion

# The fixtures import torch and Kafka's client: while pytest loads this file, warnings at their import are errors.


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Version:
    from staged_replicas import Version

    return Version(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def expected(version: Version) -> dict[str, Completion]:
    """What a whole engine generates."""
    from staged_replicas import model
    from tiny_engines import mixed, run

    from operators.rollout.transformers_engine import TransformersEngine

    return run(TransformersEngine(model(seed=7), slots=16, version=version.version), mixed(18))


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    from staged_replicas import Replica

    from infra.transport import peer
    from operators.rollout.staged import pipeline

    made: list[Replica] = []

    def make(count: int, **arguments: Any) -> list[Replica]:
        made.extend(Replica(index, tmp_path, **arguments) for index in range(count))
        return made

    with pytest.MonkeyPatch.context() as patched:  # connections that are lost are closed: no test waits for these
        patched.setattr(peer, "RESPONSE_TIMEOUT_S", 60.0)
        patched.setattr(pipeline, "PROBE_S", 60.0)
        yield make
    for each in made:
        each.close()
