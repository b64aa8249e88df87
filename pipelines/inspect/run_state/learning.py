"""Signs that a run does not learn, from the metrics of its updates and of its buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from pipelines.inspect.run_state.buffers import dropped_since_batch
from pipelines.run_config import RunConfig
from schemas.metric_labels import UNFILLED_BATCHES

WARN_STEPS = RunConfig.warn_steps
MOST = 0.9
"""The share of groups without differences, or of cut responses, of which a run is warned."""
LEAST_SKIPPED = 0.01
"""Skipped optimizer steps, as a share of the updates, of which a run is warned."""
ALL_ZERO, EQUAL, ZERO = "no reward", "equal rewards", "zero gradients"
MOSTLY_EQUAL, MOSTLY_CUT, DROPPED = "mostly equal rewards", "mostly cut responses", "dropped trajectories"
MISMATCH, SKIPPED = "mismatch", "skipped steps"
FILTER = "change the questions or the reward, or the sampler, writer or eviction that drops them"
NO_REWARD = "give partial credit, easier questions, or train the model on worked answers first"
_TEXTS = {
    ALL_ZERO: f"every reward is 0 in {{}}, so nothing can be learned: {NO_REWARD}",
    EQUAL: "rewards do not differ within any group in {}, so nothing can be learned: the questions are too hard or too "
    "easy, or the reward is constant",
    ZERO: "the gradient was 0 in {}: the model did not change",
    MOSTLY_EQUAL: f"rewards do not differ within {100 * MOST:.0f} % of the groups or more in {{}}, so little can be "
    "learned: the model rarely earns a reward, or nearly always; change the questions, give partial credit, or train "
    "the model on worked answers first",
    MOSTLY_CUT: f"{100 * MOST:.0f} % of the responses or more are cut at their limit in {{}}: raise "
    "prompts.max_new_tokens, or let the model learn to end (prompts.stop, its chat template)",
    MISMATCH: "the logprobs of rollout and trainer differed under the same weights in {}, by more than "
    "trainer.learner.mismatch_bound: the log of the trainer names likely causes",
}
_SKIPPED_TEXT = (
    "{} optimizer steps had no effect, because their loss or gradient was not finite: the log of the trainer names the "
    "batches; set a smaller trainer.learner.learning_rate, or precision float32"
)
_INDEPENDENT = (MOSTLY_CUT, MISMATCH)
"""Signs that neither rewards nor gradients cause."""


@dataclass(frozen=True, slots=True)
class LearningSigns:
    """Over the updates of a run: consecutive ones with each sign up to the newest, and the most there were.

    `clips`: whether the trainer reports how often its clip acted; `clipped`: whether it ever did. `skipped`: optimizer
    steps without an effect, because their loss or gradient was not finite.
    """

    steps: int = 0
    consecutive: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    clips: bool = False
    clipped: bool = False
    skipped: int = 0
    warn_steps: int = WARN_STEPS

    def add(self, values: Mapping[str, float]) -> LearningSigns:
        """The signs after an update with the metrics `values`."""
        equal, cut = values.get("frac_reward_zero_std", 0.0), values.get("response_length/clip_ratio", 0.0)
        has = {
            ALL_ZERO: equal == 1 and values.get("reward/mean") == 0,
            EQUAL: equal == 1,
            ZERO: values.get("grad_norm") == 0,
            MOSTLY_EQUAL: equal >= MOST,
            MOSTLY_CUT: cut >= MOST,
            MISMATCH: values.get("mismatch/above_bound") == 1,
        }
        consecutive = {sign: self.consecutive.get(sign, 0) + 1 if holds else 0 for sign, holds in has.items()}
        shares = [values[name] for name in ("clip_ratio/low", "clip_ratio/high") if name in values]
        return replace(
            self,
            steps=self.steps + 1,
            consecutive=consecutive,
            most={sign: max(self.most.get(sign, 0), count) for sign, count in consecutive.items()},
            clips=self.clips or bool(shares),
            clipped=self.clipped or any(shares),
            skipped=max(self.skipped, int(values.get("skipped_updates", 0))),
        )


NO_SIGNS = LearningSigns()


def learning_signs(updates: Iterable[Mapping[str, float]], warn_steps: int = WARN_STEPS) -> LearningSigns:
    """The signs after the metrics of `updates`, in their order."""
    return reduce(LearningSigns.add, updates, LearningSigns(warn_steps=warn_steps))


def learning_warnings(signs: LearningSigns) -> dict[str, str]:
    """What the newest updates lack, by the name of the sign."""
    return dict(_warnings(signs, signs.consecutive, "the last"))


def learning_summary(signs: LearningSigns) -> Iterator[str]:
    """What the updates of a whole run lacked."""
    yield from dict(_warnings(signs, signs.most, "up to")).values()
    if signs.clips and not signs.clipped and signs.steps >= signs.warn_steps:
        yield f"the clip never acted in {signs.steps} optimizer steps: the policy changes little, or clip_* are wide"


def dropped_warning(experience: Mapping[str, float], warn_steps: int) -> dict[str, str]:
    """That the buffer drops what is generated, from the values of its newest metric, by the name of the sign."""
    if experience.get(UNFILLED_BATCHES, 0) < warn_steps:
        return {}
    count, reason = dropped_since_batch(experience)
    return {
        DROPPED: f"{count} trajectories were dropped since the last batch ({reason}), and no batch is full: {FILTER}"
    }


def _warnings(signs: LearningSigns, counts: Mapping[str, int], which: str) -> Iterator[tuple[str, str]]:
    """The signs of enough updates; of those about rewards and gradients only the first, which causes the others."""
    found = [sign for sign in _TEXTS if counts.get(sign, 0) >= signs.warn_steps]
    causes = [sign for sign in found if sign not in _INDEPENDENT][:1]
    for sign in causes + [sign for sign in found if sign in _INDEPENDENT]:
        yield sign, _TEXTS[sign].format(f"{which} {counts[sign]} optimizer steps")
    if signs.skipped and signs.skipped >= LEAST_SKIPPED * signs.steps:
        yield SKIPPED, _SKIPPED_TEXT.format(signs.skipped)
