"""How long a run's training sequences are at least allowed to be: the trainer's memory is planned for them."""

from __future__ import annotations

from pipelines.config import Config


def longest_sequence(config: Config) -> int:
    """Tokens of the longest response that the settings of `config` allow.

    Prompts, and the turns of others in an episode, come in addition: their length is not known before they are read. A
    plan for all of `rollout.context` would refuse runs whose episodes never reach it.
    """
    longest = max(task.max_new_tokens for task in config.prompts.mixture)
    return min(longest, config.rollout.context or longest)
