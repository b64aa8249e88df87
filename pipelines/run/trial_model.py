"""The trial of the model: it is built without its weights, as the learner would."""

from __future__ import annotations

from operators.trainer.config import BUILT_IN_LEARNER
from pipelines.config import Config
from pipelines.run.preflight import model_problems
from pipelines.run.trial_calls import Started
from pipelines.run.trial_result import TrialResult


def check_model(config: Config, found: TrialResult, started: Started) -> None:
    """Add what the built-in learner would refuse of the model in model.path and its settings for it, weights aside."""
    learner = config.trainer.learner
    if config.emulated or not config.model.path or list(model_problems(config)) or learner.name != BUILT_IN_LEARNER:
        return
    started("the model's layers")
    from operators.trainer.policy import check_trainable  # deferred: imports torch

    try:
        check_trainable(config.model_folder(), learner, config.trainer.context_ranks)
    except (ValueError, OSError) as error:
        found.add_problem(str(error) if str(error).startswith("trainer.") else f"model.path: {error}")
