"""The state of the buffer's shards after a change of their number, from the states in the notes of those before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from operators.experience.buffer_layout import BufferLayout
from operators.experience.curriculum import Success
from operators.experience.shard_coordination import DivisionProgress
from operators.io.validation import NEWEST_MANIFEST
from schemas.records import PolicyVersion

State = Mapping[str, Any]


def split_buffer_state(
    states: Sequence[State], own: State, shard: int, shards: int, *, partitions: int, divisions: int
) -> State:
    """The state of `shard` of `shards`, from the `states` of all shards before it; `own` is not needed.

    Marks of settled groups, proposed groups and the progress of divisions go with the divisions. The first shard keeps
    what it selects, and how many answers of a level are right; what other shards counted goes with their number, to the
    first shard if that is gone. A state is empty if its shard had not committed one.
    """
    layout = BufferLayout(partitions, divisions, shards, shard)
    before = [BufferLayout(partitions, divisions, len(states), number) for number in range(len(states))]
    every = {
        division: each
        for layout_before, state in zip(before, states, strict=True)
        for division, each in DivisionProgress.of_state(state, layout_before.own_divisions).items()
    }
    progress = {division: every[division] for division in layout.own_divisions}
    marks = [(name, below) for state in states for name, below in state.get("settled", {}).items()]
    proposed = [group for state in states for group in state.get("proposals", (0, ()))[1]]
    versions = [PolicyVersion.parse(state["newest"]) for state in states if state.get("newest")]
    manifests = [state[NEWEST_MANIFEST] for state in states if NEWEST_MANIFEST in state]
    selected = states[0].get("proposals", (0, (), None))[2] if shard == 0 else None
    return {
        "settled": {name: below for name, below in marks if layout.owns(int(name[1:]))},
        "batch": max(each.next_batch for each in progress.values()),
        "newest": str(max(versions)) if versions else None,
        "proposals": [
            min(progress.values()).next_offset,
            sorted(group for group in proposed if layout.owns(group)),
            selected,
        ],
        **DivisionProgress.to_state(progress),
        **_curricula(states, shard, shards),
        **({NEWEST_MANIFEST: [max(each) for each in zip(*manifests, strict=True)]} if manifests else {}),
    }


def _curricula(states: Sequence[State], shard: int, shards: int) -> State:
    """The levels, and the answers counted by `shard` and, in the first one, by shards that are gone."""
    saved = [state.get("curriculum", {}) for state in states]
    tasks = dict.fromkeys(task for each in saved for task in each)
    return {"curriculum": {task: _curriculum(task, saved, shard, shards) for task in tasks}} if tasks else {}


def _curriculum(task: str, saved: Sequence[State], shard: int, shards: int) -> list[Any]:
    found = {number: each[task] for number, each in enumerate(saved) if task in each}
    level, since, *_ = max(found.values(), key=lambda each: each[1])
    # Only the first shard requests levels. A shard that is behind has counted answers of an earlier level.
    requested = shard == 0 and 0 in found and found[0][1] == since and found[0][2]
    counted: dict[str, Success] = {}
    for number, (_, since_then, _, counts) in found.items():
        if since_then == since and number in (shard, *(range(shards, len(saved)) if shard == 0 else ())):
            for name, (right, answered) in counts.items():
                counted[name] = counted.get(name, Success()).plus(right, answered)
    return [level, since, requested, {name: list(each) for name, each in counted.items()}]
