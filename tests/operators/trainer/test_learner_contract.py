"""Every learner passes the checks of `learner_suite.py`. Add the name of a learner to `LEARNERS` to test it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import learner_suite
import pytest
from learner_suite import CHECKS, Suite
from trainer_batches import save_tiny_model

from operators.trainer.config import BUILT_IN_LEARNER

EXAMPLE = "WithNorm"
"""The learner of CONTRIBUTING.md."""
LEARNERS = (BUILT_IN_LEARNER, EXAMPLE)
"""Values of `trainer.learner.name`, and the example."""
RANKS = 2
CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"

Results = list[dict[str, str]]


@pytest.fixture(scope="module", params=LEARNERS)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The suite of a learner, alone."""
    folder = tmp_path_factory.mktemp("contract")
    save_tiny_model(folder / "model")
    return Suite(write_example(folder) if request.param == EXAMPLE else request.param, folder)


def write_example(folder: Path) -> str:
    """The name of the example, which is written into a file in `folder`."""
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text("utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if f"class {EXAMPLE}(" in block)
    (file := folder / "example.py").write_text(code)
    return f"{file}:{EXAMPLE}"


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
