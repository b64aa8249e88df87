"""Identities of prompts and trajectories: readable strings that carry a dense number.

Numbers rise from 0 without gaps within a purpose, so the set of finished ones is a low-water mark plus a few
exceptions. `p12` is training prompt 12 and also the group of its samples; `p12.3` is its fourth trajectory; `e7` is an
evaluation prompt; `i4` is an imported group, which was never a prompt of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Purpose = Literal["train", "evaluation", "imported"]

LETTERS: Mapping[Purpose, str] = {"train": "p", "evaluation": "e", "imported": "i"}
"""The first letter of ids, by purpose."""
PURPOSES: Mapping[str, Purpose] = {letter: purpose for purpose, letter in LETTERS.items()}
_TRAJECTORY = re.compile(r"([pei])(0|[1-9]\d{0,17})\.(0|[1-9]\d{0,5})")


class TrajectoryKey(NamedTuple):
    """The parts of a trajectory id."""

    purpose: Purpose
    number: int
    member: int


def group_id(purpose: Purpose, number: int) -> str:
    """The id of prompt `number`, and of the group of its samples."""
    return f"{LETTERS[purpose]}{number}"


def trajectory_id(purpose: Purpose, number: int, member: int) -> str:
    """The id of sample `member` of prompt `number`."""
    return f"{LETTERS[purpose]}{number}.{member}"


def is_trajectory_id(text: str) -> bool:
    return _TRAJECTORY.fullmatch(text) is not None


def parse_trajectory_id(text: str) -> TrajectoryKey:
    """The parts of `text`. Raises ValueError if it is not a trajectory id."""
    match = _TRAJECTORY.fullmatch(text)
    if match is None:
        raise ValueError(f"not a trajectory id: {text[:80]!r} (expected e.g. 'p12.3')")
    return TrajectoryKey(PURPOSES[match[1]], int(match[2]), int(match[3]))
