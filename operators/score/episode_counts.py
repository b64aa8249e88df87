"""Counts of the episodes of environments in training: episodes, turns of the model, and how they ended."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from schemas.block import Block
from schemas.metric_labels import ENDING, labelled
from schemas.records import AGENT

EPISODES, TURNS, ENDINGS = "episodes", "episode_turns", "episode_endings"


def count_episodes(values: Counter[str], experiences: Block, trained: pa.Array) -> None:
    """Add to `values` the episodes of `experiences` for which `trained` is true. Those of agents have own metrics."""
    endings = experiences.column("trajectory.episode.ending")
    own = pc.and_(pc.is_valid(endings), pc.not_equal(experiences.column("trajectory.prompt.environment"), AGENT))
    counted = pc.and_(own, trained)
    turns = pc.list_value_length(experiences.column("trajectory.episode.rewards").filter(counted))
    if not len(turns):
        return
    values[EPISODES] += len(turns)
    values[TURNS] += pc.sum(turns).as_py() or 0
    for each in pc.value_counts(endings.filter(counted)).to_pylist():
        values[labelled(ENDINGS, **{ENDING: each["values"]})] += each["counts"]
