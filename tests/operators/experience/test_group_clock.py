"""Groups do not age while the run is paused: placement assigns no missing member then."""

from __future__ import annotations

from typing import Any

import pytest
from buffer_harness import Buffer
from record_factories import experience, prompt, trajectory

from operators.experience.config import Component
from operators.experience.group_clock import GroupClock


def test_clock_leaves_out_the_time_in_which_it_is_stopped() -> None:
    now = 5.0
    clock = GroupClock(lambda: now)
    clock.go()
    assert clock() == 5.0
    clock.stop()
    now = 100.0
    clock.stop()
    assert clock() == 5.0
    clock.go()
    clock.go()
    now = 103.0
    assert clock() == 8.0


@pytest.mark.parametrize(
    ("age", "outcome"),
    [({"group_timeout_s": 10}, "batched"), ({"evictions": (Component("age", {"seconds": 10.0}),)}, "dropped")],
)
def test_groups_do_not_age_while_the_run_is_paused(age: dict[str, Any], outcome: str) -> None:
    buffer = Buffer(global_batch=2, **age)
    now = 0.0
    buffer.shard.fold._clock = GroupClock(lambda: now)  # type: ignore[union-attr]
    buffer.score(*(experience(trajectory(prompt(0, 4), member)) for member in range(2)))
    buffer.shard.run()
    now = 9.0
    buffer.pause(1)
    buffer.shard.run()
    now = 5000.0
    buffer.shard.run()
    assert buffer.outcomes() == {}
    buffer.pause(2, paused=False)
    buffer.shard.run()
    assert buffer.outcomes() == {}
    now = 5002.0
    buffer.score(experience(trajectory(prompt(2, 4), 0)))  # evictions follow new records
    buffer.shard.run()
    assert buffer.outcomes() == dict.fromkeys(("p0.0", "p0.1"), outcome)
