"""The role prompts on a log in memory, as far as it changes levels: it draws no prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from in_memory_log import Log, Shard
from record_factories import shard, topic_input

from operators.prompts.config import PromptsConfig
from operators.prompts.draw_prompts import DrawPrompts
from schemas.topics import CURRICULUM, LEVEL_REQUEST


def levels_shard(log: Log, levels: int, clock: Callable[[], float]) -> Shard:
    """Prompts with a curriculum of `levels`, not started."""
    source = shard("prompts", topic_input(CURRICULUM, keys=(LEVEL_REQUEST,)))
    step = DrawPrompts(PromptsConfig(source="synthetic", levels=({},) * levels), source, None, 64, lead=0)
    backlog: Any = SimpleNamespace(records=lambda: 0, close=lambda: None)
    return Shard(log, source, partial(step.restore, backlog=backlog, clock=clock, now=lambda: 0, notes=log.notes))
