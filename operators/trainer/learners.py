"""Opens the learner that `trainer.learner.name` names: the built-in one, or a user's."""

from __future__ import annotations

from pathlib import Path

from infra.name_lookup import member_of
from operators.trainer.config import BUILT_IN_LEARNER, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.learner_contract import LearnerContract, OpenLearner
from operators.trainer.ranks import ALONE, Ranks


def open_learner(config: LearnerConfig, model: Path, device: str = "cpu", ranks: Ranks = ALONE) -> LearnerContract:
    """The learner of `config` for the model in a folder. Raises ValueError for a name that cannot be loaded, and what
    the learner refuses."""
    try:
        opened = load_learner(config.name)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"trainer.learner.name: {config.name!r} cannot be loaded: {error}") from error
    return opened(config, model, device, ranks)


def load_learner(name: str) -> OpenLearner:
    """What opens the learner `name`. Raises ValueError if there is none, and what the import of its module raises."""
    if name == BUILT_IN_LEARNER:
        return Learner
    module, _, member = name.rpartition(":")
    found: OpenLearner = member_of(module, member, "class or function", callable)
    return found
