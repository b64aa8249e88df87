"""When a run has reached its goal: its last version is trained and, where questions are held out, evaluated."""

from __future__ import annotations

from pipelines.config import Config
from schemas.records import Metric


class Goal:
    """Follows a run's metrics. `phase` is what it is busy with."""

    def __init__(self, config: Config) -> None:
        self._steps = config.trainer.optimizer_steps
        held_out = bool(config.prompts.heldout or config.prompts.heldout_path)
        self._awaited = {"greedy", "sampled"} if config.evaluation.sampled else {"greedy"}
        if not held_out:
            self._awaited = set()
        self._trained = 0

    @property
    def reached(self) -> bool:
        return self._trained >= self._steps and not self._awaited

    @property
    def phase(self) -> str:
        if self._trained >= self._steps:
            return "final evaluation"
        return "training" if self._trained else "starting"

    def see(self, metric: Metric) -> None:
        """Take in a metric."""
        if metric.name == "trainer":
            self._trained = max(self._trained, metric.step)
        elif metric.name == "evaluation" and metric.values.get("final"):
            self._awaited -= {name.removeprefix("accuracy/") for name in metric.values if name.startswith("accuracy/")}
