"""Writers: which members enter the buffer; each refusal is a Settled record. By name, or a user's `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.setting_types import CheckedSettings, PositiveInt
from operators.experience.members import GroupMember


@dataclass(frozen=True)
class Writer:
    """The base class; it accepts every member that can be trained. The options of a writer are its dataclass fields."""

    def refuse(self, member: GroupMember) -> str | None:
        """Why `member` must not be trained, or None. The group of a refused member completes without it."""
        return None


@dataclass(frozen=True)
class Finished(Writer):
    """Refuses responses cut off at their length limit (overlong filtering: DAPO, arXiv 2503.14476, 3.4)."""

    def refuse(self, member: GroupMember) -> str | None:
        return f"cut off after {member.tokens} tokens" if member.truncated else None


@dataclass(frozen=True)
class Bounded(Writer, CheckedSettings):
    """Refuses sequences, prompt included, of more than `tokens` tokens: set it to what the trainer's memory holds."""

    tokens: PositiveInt = 131_072

    def refuse(self, member: GroupMember) -> str | None:
        return f"{member.length} tokens are more than {self.tokens}" if member.length > self.tokens else None


WRITERS: Mapping[str, type[Writer]] = {"all": Writer, "finished": Finished, "bounded": Bounded}
