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
    text = str(refused.value)
    assert f"the worker on {platform.node()} has laminar-rl {installed()['laminar-rl']} instead of 0.1.9" in text
    steps = ["stop the submission", "install one release on all machines", "start their worker pools", "submit again"]
    assert sorted(steps, key=text.index) == steps
    assert "docs/operations.md, Upgrade" in text
