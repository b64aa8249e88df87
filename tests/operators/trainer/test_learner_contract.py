"""Every learner passes the checks of `learner_suite.py`. Add the name of a learner to `LEARNERS` to test it."""

from __future__ import annotations

import json
import subprocess
import sys

import learner_suite
import pytest
from learner_suite import CHECKS, Suite
from trainer_batches import save_tiny_model

from operators.trainer.config import BUILT_IN_LEARNER

LEARNERS = (BUILT_IN_LEARNER,)
"""Values of `trainer.learner.name`."""
RANKS = 2

Results = list[dict[str, str]]


@pytest.fixture(scope="module", params=LEARNERS)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The suite of a learner, alone."""
    folder = tmp_path_factory.mktemp("contract")
    save_tiny_model(folder / "model")
    return Suite(request.param, folder)


@pytest.fixture(scope="module")
def of_two(suite: Suite) -> Results:
    """The results of each of two ranks, in the suite's folder too."""
    command = [sys.executable, str(learner_suite.__file__), suite.name, str(suite.folder), str(RANKS)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((suite.folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("check", CHECKS)
def test_learner_alone(suite: Suite, check: str) -> None:
    CHECKS[check](suite)


@pytest.mark.parametrize("check", CHECKS)
def test_learner_of_two_ranks(of_two: Results, check: str) -> None:
    for rank, found in enumerate(of_two):
        assert check in found, f"rank {rank} failed before: {[each for each in found.values() if each]}"
        assert not found[check], f"rank {rank}: {found[check]}"
