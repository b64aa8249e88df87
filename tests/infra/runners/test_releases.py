"""A worker of another release than the submitter's is refused, with both versions and the machine."""

from __future__ import annotations

import pickle
import platform

import pytest

from infra.runners.releases import OtherRelease, check_releases, installed
from operators.io.read_topics import _PollTopicsFn


def test_worker_of_another_release_is_refused() -> None:
    step = _PollTopicsFn((), 1.0)
    check_releases(pickle.loads(pickle.dumps(step)).releases)
    step.releases = {**installed(), "laminar-rl": "0.1.9"}
    with pytest.raises(OtherRelease) as refused:
        pickle.loads(pickle.dumps(step)).setup()
    for part in ("instead of 0.1.9", installed()["laminar-rl"], platform.node()):
        assert part in str(refused.value)
