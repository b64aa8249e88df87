"""Rewards of the conversations of an agent's episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scored_trajectories import CONFIG, FixedJudge, scored, trajectory

from operators.score.config import RewardSpec, ScoreConfig
from operators.score.pool import VerifierResult
from operators.score.scorer import Scorer
from operators.score.scoring import score_trajectories
from schemas.block import Block
from schemas.records import AGENT, Conversation, Episode, Trajectory


def of_agent(text: str, **changes: Any) -> Trajectory:
    made = trajectory(text, **changes)
    return replace(made, prompt=replace(made.prompt, environment=AGENT))


BRANCHES = tuple(Conversation(at, 1, json.dumps([{"role": "user", "content": f"u{at}"}])) for at in (0, 2))


@pytest.mark.parametrize(
    ("results", "rewards", "reward"),
    [
        ([VerifierResult(1.0, None)] * 3, (), 1.25),
        (
            [VerifierResult(0.5, None, (0.0, 1.0)), VerifierResult(1.0, None), VerifierResult(0.25, None, (0.5, 0.0))],
            (2.0 - 0.5, 0.25 + 2.0),
            (1.5 + 2.25) / 2,
        ),
    ],
)
def test_conversations_have_weighted_sums_of_their_own(
    results: list[VerifierResult], rewards: tuple[float, ...], reward: float
) -> None:
    (experience,) = scored([trajectory("#4", conversations=BRANCHES)], FixedJudge(CONFIG, *results))
    assert (experience.conversation_rewards, experience.reward) == (rewards, reward)


def test_error_of_a_reward_leaves_no_rewards_of_conversations() -> None:
    judge = FixedJudge(
        CONFIG, VerifierResult(0.5, None, (0.0, 1.0)), VerifierResult(None, "x"), VerifierResult(0, None)
    )
    (experience,) = scored([trajectory("#4", conversations=BRANCHES)], judge)
    assert (experience.conversation_rewards, experience.reward) == ((), -0.5)


@pytest.mark.parametrize(
    ("code", "rewards", "error"),
    [
        ("[each['reward'] for each in conversations]", (1.0, 0.25), None),
        ("tuple(float(each['messages'][0]['content'] == 'u2') for each in conversations)", (0.0, 1.0), None),
        ("0.5", (), None),
        ("[1.0]", (), "ValueError: returned 1 numbers for 2 conversations: return one, or one for each"),
        ("[1.0, float('nan')]", (), "ValueError: returned nan"),
        ("[1.7e308] * 2", (), "ValueError: returned 1.7e+308"),
        ("[1.0, None]", (), "TypeError: returned NoneType instead of a number"),
        ("[1.0] * 500", (), "ValueError: returned 500 numbers for 2 conversations: return one, or one for each"),
    ],
)
def test_function_may_return_a_number_for_each_conversation(
    code: str, rewards: tuple[float, ...], error: str | None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"def each(conversations):\n    return {code}\n")
    config = ScoreConfig(rewards=(RewardSpec(f"{tmp_path / 'mine.py'}:each"),), workers=1, on_error=-1.0)
    made = of_agent("#4", conversations=BRANCHES, conversation_rewards=(1.0, 0.25), episode=Episode((1.0,), "done"))
    with Scorer(config) as scorer:
        (experience,) = score_trajectories(Block.of([made]), scorer, 0).records()
    assert experience.conversation_rewards == rewards
    assert experience.reward == (-1.0 if error else sum(rewards) / len(rewards) if rewards else 0.5)
    assert error is None or error in str(experience.error)


@pytest.mark.parametrize("extraction", [{}, {"answer": "regex", "answer_regex": "#(.*)", "workers": 1}])
def test_environment_reward_is_that_of_each_conversation(extraction: dict[str, Any]) -> None:
    """With an expression of the user the reward is computed in another process."""
    config = ScoreConfig(rewards=(RewardSpec("environment", 2.0),), **extraction)
    made = of_agent("#4", conversations=BRANCHES, conversation_rewards=(1.0, 0.25), episode=Episode((1.0,), "done"))
    plain = replace(made, conversation_rewards=())
    with Scorer(config) as scorer:
        own, shared = score_trajectories(Block.of([made, plain]), scorer, 0).records()
    assert (own.conversation_rewards, own.reward) == ((2.0, 0.5), 1.25)
    assert (shared.conversation_rewards, shared.reward) == ((), 2.0)
