"""Every task of reasoning-gym works by its name alone, and its verifier accepts its own answer after JSON."""

from __future__ import annotations

import json
import warnings

import pytest

from operators.prompts.config import PromptsConfig
from operators.prompts.sources import open_source
from operators.score.verifiers.reasoning import verify

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def test_every_task_works_by_its_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's dependencies
        from reasoning_gym.factory import DATASETS

        for task in sorted(DATASETS.keys() - {"composite"}):  # which needs the tasks to compose
            source = open_source(PromptsConfig(task=task, heldout=2))
            for number in range(min(20, source.total or 20)):
                reference = json.loads(json.dumps(source[number].reference))
                score = verify(reference["answer"], reference, task)
                assert score == 1.0 or reference["answer"] is None, task  # None: any correct answer is accepted
                for answer in ("1", "[1]", "{}", "{'a': [", "no idea"):
                    assert 0.0 <= verify(answer, reference, task) <= 1.0, task
