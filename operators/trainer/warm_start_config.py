"""What the warm start teaches, and for how long. Free of torch, so that a command line can read it at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.models.demo_config import DemoModelConfig


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """A supervised start for a model made in code. Raises ValueError naming the field that does not fit.

    Phase 1 imitates worked answers. `careless_share` of them come from a careless teacher, who slips with probability
    `slip_rate` at every step where one can (see `traces.py`: a forgotten carry, an end too soon). That bounds what
    imitation can reach at any number of steps: greedy answers follow the majority, sampled ones are right as often as
    the teachers are. Phase 2, where `habit_steps` is not 0, teaches a bad habit: `habit_share` of its answers are
    bare, without any work.

    `calculator_share` of phase 1's answers are of a third teacher, who asks the environment `calculator` and says what
    it says; this is for sums alone, which have an expression to ask for.
    """

    model: DemoModelConfig = field(default_factory=DemoModelConfig)
    examples: int = 20_000
    """Distinct draws of the task to learn from."""
    batch: int = 64
    """Examples an update."""
    steps: int = 500
    """Updates of phase 1."""
    learning_rate: float = 1e-2
    """Peak of phase 1 for embeddings, norms and biases (AdamW); rates fall linearly to 0."""
    matrix_learning_rate: float = 5e-3
    """Peak of phase 1 for the matrices between (Muon)."""
    warmup: int = 5
    """Updates over which the rates of a phase rise."""
    careless_share: float = 1.0
    """Worked answers of the careless teacher among all, drawn answer by answer."""
    slip_rate: float = 0.0
    """How often the careless teacher slips, step by step."""
    calculator_share: float = 0.0
    """Answers that ask a calculator, among all, drawn answer by answer."""
    habit_steps: int = 0
    habit_share: float = 0.7
    habit_learning_rate: float = 5e-4
    """Peak of phase 2, of both optimizers."""
    measured: int = 256
    """Held-out questions on which checkpoints are measured."""
    measure_every: int = 100
    """Updates between two measured checkpoints of phase 1: the best of them is what a supervised run could have had."""
    max_new_tokens: int = 48
    """Tokens of a measured answer at most."""
    seed: int = 0
    """Of slips, habits and the order of examples; the weights' is `model.seed`."""

    def __post_init__(self) -> None:
        for name in ("examples", "batch", "steps", "measured", "measure_every", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("careless_share", "slip_rate", "calculator_share", "habit_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        for name in ("learning_rate", "matrix_learning_rate", "habit_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.calculator_share and self.model.task != "chain_sum":
            raise ValueError(f"calculator_share is for model.task 'chain_sum', not {self.model.task!r}")
        for name in ("warmup", "habit_steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
