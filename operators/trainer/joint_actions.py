"""What the ranks do together between two batches: rank 0 decides when the weights are gathered, the others join.

Each action begins with an exchange in which rank 0's intention counts. A rank that came to train while rank 0 wants the
weights joins the gathering, then exchanges again; an idle rank learns from the rendezvous' store that it is wanted. So
all ranks call the same collectives in the same order, whatever each of them has read from the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

from operators.trainer.learner_contract import FullWeights
from operators.trainer.rendezvous import Rendezvous

_COUNTER = "gatherings"


class _Action(IntEnum):
    TRAIN = 0
    NOTHING = 1
    GATHER = 2
    """Gather the weights in the rollouts' dtype."""
    GATHER_FULL = 3
    """Gather the weights in the dtype in which they are trained."""


class JointActions:
    """The joint actions of one rank of `rendezvous`: gathering `rounded` weights, for rollouts, or `full` ones.

    With a single rank nothing is exchanged.
    """

    def __init__(self, rendezvous: Rendezvous, rounded: FullWeights, full: FullWeights) -> None:
        self._store, self._ranks = rendezvous.store, rendezvous.ranks
        self._weights = {_Action.GATHER: rounded, _Action.GATHER_FULL: full}
        self._joined = 0
        """Gatherings that this rank has taken part in."""
        self._undecided = False
        """Whether the others wait, after a batch, for rank 0 to gather or not."""

    def before_training(self) -> None:
        """Join what rank 0 wants before the next batch. Every rank calls it when it has the batch."""
        self.proceed()
        while self._join(self._exchange(_Action.TRAIN)):
            pass

    def after_training(self) -> None:
        """Wait until rank 0 has decided whether to gather the weights, and join; rank 0 decides by what it calls next:
        `gather` or `proceed`.
        """
        if self._ranks.rank == 0:
            self._undecided = self._ranks.count > 1
        else:
            self._join(self._exchange(_Action.NOTHING))

    def while_idle(self) -> None:
        """Join a gathering that rank 0 wants now. Ranks other than 0 call it while they have no batch."""
        if self._store is not None and self._ranks.rank and self._store.add(_COUNTER, 0) > self._joined:
            self._join(self._exchange(_Action.NOTHING))

    def gather(self, *, full: bool) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights, one tensor at a time, on rank 0."""
        action = _Action.GATHER_FULL if full else _Action.GATHER
        if self._store is not None:
            self._store.add(_COUNTER, 1)
        self._undecided = False
        self._exchange(action)
        yield from self._weights[action].items()

    def proceed(self) -> None:
        """Let ranks that wait for a decision continue. Only rank 0 has such ranks."""
        if self._undecided:
            self._undecided = False
            self._exchange(_Action.NOTHING)

    def _join(self, action: _Action) -> bool:
        """Take part in `action` if it is a gathering; whether it is."""
        if action not in self._weights:
            return False
        self._joined += 1
        for _ in self._weights[action].items():
            pass
        return True

    def _exchange(self, action: _Action) -> _Action:
        """Exchange intentions, and return rank 0's."""
        return _Action(int(self._ranks.gather(torch.tensor([action]))[0]))
