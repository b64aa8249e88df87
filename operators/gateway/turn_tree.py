"""The turns of an episode as a tree: each continues the conversation of an earlier turn, or begins a new one.

A path from a root to a leaf is a conversation. Imports no numeric code: commands that only read use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schemas.records.agents import TokenRange, TurnEnded, TurnRequest, extended

Ranges = tuple[TokenRange, ...]


class EndedTurn(NamedTuple):
    """A turn whose response is complete."""

    request: TurnRequest
    ended: TurnEnded

    @property
    def given(self) -> int:
        """Where its response begins among the tokens of the episode."""
        return self.request.start + len(self.request.token_ids)

    @property
    def asked(self) -> Ranges:
        """What the model read."""
        return extended(self.request.context, self.request.start, self.given)

    @property
    def whole(self) -> Ranges:
        """What the model read, and its response."""
        return extended(self.asked, self.given, self.ended.stop)


def leaf_turns(turns: Sequence[EndedTurn]) -> list[EndedTurn]:
    """The turns whose conversation no other turn continues, in their order."""
    continued = {turn.request.context for turn in turns}
    return [turn for turn in turns if turn.whole not in continued]


def length_of(ranges: Ranges) -> int:
    """How many tokens are in `ranges`."""
    return sum(each.stop - each.start for each in ranges)
