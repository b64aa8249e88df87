"""Figures of the episodes of environments, in the metric `score`: their turns, and how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.metric_labels import ENDING, by_label


def episodes_of(score: Mapping[str, float]) -> dict[str, Any] | None:
    """The episodes, their mean number of turns, and how many ended how, JSON-ready; None without episodes."""
    episodes = int(score.get("episodes", 0))
    if not episodes:
        return None
    endings = {ending: int(found.get("episode_endings", 0)) for ending, found in by_label(score, ENDING).items()}
    ordered = dict(sorted(endings.items(), key=lambda item: -item[1]))
    return {"episodes": episodes, "turns_mean": score.get("episode_turns", 0.0) / episodes, "endings": ordered}


def endings_text(endings: Mapping[str, int]) -> str:
    """Return `done 812, turns 500`."""
    return ", ".join(f"{ending} {count}" for ending, count in endings.items())
