"""The wait for a final version that is lost with its machine: the trainer may publish it again."""

from __future__ import annotations

import pytest
from record_factories import experience, failed
from test_evaluate_versions import Evaluation

from infra.clocks import wall_ms
from operators.evaluation.config import EvaluationConfig
from operators.evaluation.evaluate_versions import REPUBLISH_S, EvaluateVersions
from operators.evaluation.report_rounds import GIVEN_UP
from operators.io.elements import Polled, Restored
from schemas.topics import EVAL_PROMPTS


@pytest.mark.parametrize("noted", [True, False], ids=["own note", "older release"])
def test_lost_final_version_waits_on_another_clock(noted: bool) -> None:
    """The rest of the wait is in the note; an older release noted only when its clock said that it began."""
    evaluation = Evaluation(questions=1, sampled=False)
    evaluation.publish(6, final=True)
    evaluation.shard.run()
    (asked,) = evaluation.log.rows(EVAL_PROMPTS)
    evaluation.score(experience(failed(asked, 0, "weight version 1.6 is gone")))
    evaluation.shard.run()
    note = evaluation.shard.fold.checkpoint({}).state  # type: ignore[union-attr]
    assert 0 < note["republish_s"] <= REPUBLISH_S
    left = note["republish_s"] = 20
    if not noted:
        del note["republish_s"]
        left = REPUBLISH_S
    idle = Polled("g", 2, (), (), {}, caught_up=True)
    monotonic, year = [500.0], 365 * 86400 * 1000
    fold = EvaluateVersions(EvaluationConfig(sampled=False), lambda: [asked]).restore(
        Restored("g", 2, (), note, {}), lambda: monotonic[0], lambda: wall_ms() + year
    )
    assert GIVEN_UP not in fold.fold(idle)[0].values  # type: ignore[union-attr] # the one of before, again
    monotonic[0] += left - 1
    assert fold.fold(idle) == []
    monotonic[0] += 1
    (metric,) = fold.fold(idle)
    assert metric.values[GIVEN_UP] == 1.0  # type: ignore[union-attr]
