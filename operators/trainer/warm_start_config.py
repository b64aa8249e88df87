"""The warm start's configuration. It does not import torch, so that the command line starts fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.models.demo_config import DemoModelConfig
from infra.setting_types import CheckedSettings, NonNegativeInt, Positive, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(CheckedSettings):
    """Supervised training of a small model built in code. Raises ValueError naming the invalid field.

    Phase 1 imitates worked answers. `careless_share` of them come from a careless teacher, who makes an error with
    probability `slip_rate` at every step where its trace defines one (a forgotten carry, an early end). This bounds
    the accuracy of imitation at any number of steps: greedy answers follow the majority, sampled answers are correct as
    often as the teachers'. Phase 2, if `habit_steps` is not 0, teaches a bad habit: `habit_share` of its answers are
    bare, without steps.

    With a curriculum (`prompts.levels`) the teachers answer questions of its first level only.

    `calculator_share` of phase 1's answers come from a third teacher, who calls the environment `calculator` and
    answers with its result. This is for `chain_sum` only, whose questions have an expression.
    """

    model: DemoModelConfig = field(default_factory=DemoModelConfig)
    examples: PositiveInt = 20_000
    """Distinct draws of the task to learn from."""
    batch: PositiveInt = 64
    """Examples per update."""
    steps: PositiveInt = 500
    """Updates of phase 1."""
    learning_rate: Positive = 1e-2
    """Peak in phase 1 for embeddings, norms and biases (AdamW); rates fall linearly to 0."""
    matrix_learning_rate: Positive = 5e-3
    """Peak in phase 1 for all other matrices (Muon)."""
    warmup: NonNegativeInt = 5
    """Warm-up updates of each phase."""
    careless_share: Share = 1.0
    """Probability that a worked answer is the careless teacher's."""
    slip_rate: Share = 0.0
    """Probability of an error of the careless teacher, per step."""
    calculator_share: Share = 0.0
    """Probability that a worked answer calls the calculator."""
    habit_steps: NonNegativeInt = 0
    """Updates of phase 2; 0: no phase 2."""
    habit_share: Share = 0.7
    """Probability that an answer of phase 2 is bare."""
    habit_learning_rate: Positive = 5e-4
    """Peak in phase 2, for both optimizers."""
    measured: PositiveInt = 256
    """Number of held-out questions for measurements."""
    measure_every: PositiveInt = 100
    """Updates between two measurements in phase 1; the best one is the supervised baseline."""
    max_new_tokens: PositiveInt = 48
    """Maximum tokens of a measured answer."""
    seed: NonNegativeInt = 0
    """Seed of the teachers' errors, bare answers and the order of examples; `model.seed` is that of the weights."""

    def _check(self) -> None:
        if self.calculator_share and self.model.task != "chain_sum":
            raise ValueError(f"calculator_share needs model.task = 'chain_sum', not {self.model.task!r}")
