"""Every learner passes the checks of `learner_suite.py`. Add the name of a learner to `LEARNERS` to test it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def suite_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Suite]:
    """Returns the suite of a learner, alone. It is made once, also if the tests of learners take turns."""

    @functools.cache
    def made(learner: str) -> Suite:
        folder = tmp_path_factory.mktemp("contract")
        save_tiny_model(folder / "model")
        return Suite(write_example(folder) if learner == EXAMPLE else learner, folder)

    return made


def write_example(folder: Path) -> str:
    """The name of the example, which is written into a file in `folder`."""
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text("utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if f"class {EXAMPLE}(" in block)
    (file := folder / "example.py").write_text(code)
    return f"{file}:{EXAMPLE}"


@pytest.fixture(scope="module")
def results_of_two(suite_of: Callable[[str], Suite]) -> Callable[[str], Results]:
    """Returns the results of each of two ranks of a learner, in the suite's folder too."""

    @functools.cache
    def found(learner: str) -> Results:
        suite = suite_of(learner)
        command = [sys.executable, str(learner_suite.__file__), suite.name, str(suite.folder), str(RANKS)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads((suite.folder / f"{rank}.json").read_text()) for rank in range(RANKS)]

    return found


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_learner_alone(suite_of: Callable[[str], Suite], learner: str, check: str) -> None:
    CHECKS[check](suite_of(learner))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_learner_of_two_ranks(results_of_two: Callable[[str], Results], learner: str, check: str) -> None:
    for rank, found in enumerate(results_of_two(learner)):
        assert check in found, f"rank {rank} failed before: {[each for each in found.values() if each]}"
        assert not found[check], f"rank {rank}: {found[check]}"
