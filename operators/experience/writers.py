"""What enters the buffer: writers, found by name, or `module:Class` of the user's. Each refusal is a Settled record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from operators.experience.members import GroupMember


@dataclass(frozen=True)
class Writer:
    """Lets everything in that can be trained. Others derive from it; options are fields."""

    def refuse(self, member: GroupMember) -> str | None:
        """Why `member` is not to be trained; None: it may be. Its group completes without it."""
        return None


@dataclass(frozen=True)
class Verified(Writer):
    """Refuses what a verifier failed on: its reward is made up."""

    def refuse(self, member: GroupMember) -> str | None:
        return f"not verified: {member.error}" if member.error else None


@dataclass(frozen=True)
class Finished(Writer):
    """Refuses what was cut off at its length limit (overlong filtering: DAPO, arXiv 2503.14476, 3.4)."""

    def refuse(self, member: GroupMember) -> str | None:
        return f"cut off after {member.tokens} tokens" if member.truncated else None


@dataclass(frozen=True)
class Bounded(Writer):
    """Refuses sequences, prompt included, of more than `tokens` tokens: more than a trainer's memory holds."""

    tokens: int = 131_072

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, not {self.tokens}")

    def refuse(self, member: GroupMember) -> str | None:
        return f"{member.length} tokens are more than {self.tokens}" if member.length > self.tokens else None


WRITERS: Mapping[str, type[Writer]] = {"all": Writer, "verified": Verified, "finished": Finished, "bounded": Bounded}
