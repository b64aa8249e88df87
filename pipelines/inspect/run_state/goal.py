"""When a run has reached its goal."""

from __future__ import annotations

from pipelines.config import Config
from pipelines.inspect.run_state.state import RunState


def is_trained(state: RunState, config: Config) -> bool:
    """Whether the last optimizer step is done."""
    return state.step >= config.trainer.optimizer_steps


def is_evaluated(config: Config) -> bool:
    """Whether the run evaluates its last version on held-out questions."""
    return any(task.has_heldout for task in config.prompts.mixture)


def is_reached(state: RunState, config: Config) -> bool:
    """Whether the run has reached its goal and can drain."""
    if not is_trained(state, config) or not is_evaluated(config):
        return is_trained(state, config)
    last = state.evaluation
    if last is None or not last.final or last.version < config.trainer.optimizer_steps:  # that of an earlier goal
        return False
    done = {mode for mode, accuracy in (("greedy", last.greedy), ("sampled", last.sampled)) if accuracy is not None}
    done |= last.given_up  # a round that cannot be measured does not keep the run from its end
    return done >= ({"greedy", "sampled"} if config.evaluation.sampled else {"greedy"})
