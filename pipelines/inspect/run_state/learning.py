"""Signs that a run does not learn, from the metrics of its updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce

from pipelines.run_config import RunConfig

WARN_STEPS = RunConfig.warn_steps


@dataclass(frozen=True, slots=True)
class LearningSigns:
    """Over the updates of a run; `zero_gradients` and `equal_rewards` count consecutive ones up to the newest.

    `clips`: whether the trainer reports how often its clip acted; `clipped`: whether it ever did.
    """

    steps: int = 0
    zero_gradients: int = 0
    equal_rewards: int = 0
    most_zero_gradients: int = 0
    most_equal_rewards: int = 0
    clips: bool = False
    clipped: bool = False
    warn_steps: int = WARN_STEPS

    def add(self, values: Mapping[str, float]) -> LearningSigns:
        """The signs after an update with the metrics `values`."""
        zero = self.zero_gradients + 1 if values.get("grad_norm") == 0 else 0
        equal = self.equal_rewards + 1 if values.get("frac_reward_zero_std") == 1 else 0
        shares = [values[name] for name in ("clip_ratio/low", "clip_ratio/high") if name in values]
        return replace(
            self,
            steps=self.steps + 1,
            zero_gradients=zero,
            equal_rewards=equal,
            most_zero_gradients=max(self.most_zero_gradients, zero),
            most_equal_rewards=max(self.most_equal_rewards, equal),
            clips=self.clips or bool(shares),
            clipped=self.clipped or any(shares),
        )


NO_SIGNS = LearningSigns()


def learning_signs(updates: Iterable[Mapping[str, float]], warn_steps: int = WARN_STEPS) -> LearningSigns:
    """The signs after the metrics of `updates`, in their order."""
    return reduce(LearningSigns.add, updates, LearningSigns(warn_steps=warn_steps))


def learning_warnings(signs: LearningSigns) -> Iterator[str]:
    """What the newest updates lack."""
    yield from _warnings(signs.equal_rewards, signs.zero_gradients, signs.warn_steps, "the last")


def learning_summary(signs: LearningSigns) -> Iterator[str]:
    """What the updates of a whole run lacked."""
    yield from _warnings(signs.most_equal_rewards, signs.most_zero_gradients, signs.warn_steps, "up to")
    if signs.clips and not signs.clipped and signs.steps >= signs.warn_steps:
        yield f"the clip never acted in {signs.steps} optimizer steps: the policy changes little, or clip_* are wide"


def _warnings(equal_rewards: int, zero_gradients: int, enough: int, which: str) -> Iterator[str]:
    if equal_rewards >= enough:
        yield (
            f"rewards do not differ within any group in {which} {equal_rewards} optimizer steps, so nothing can be "
            "learned: the questions are too hard or too easy, or the reward is constant"
        )
    elif zero_gradients >= enough:
        yield f"the gradient was 0 in {which} {zero_gradients} optimizer steps: the model did not change"
