"""What dies is started again ever less soon, and given up when it dies too often."""

from __future__ import annotations

from pipelines.run.restarts import FIRST_PAUSE_S, MAX_DEATHS, WITHIN_S, Restarts


def test_pauses_double_until_it_is_given_up() -> None:
    restarts = Restarts(clock=lambda: 0.0)
    pauses = [restarts.record_death() for _ in range(MAX_DEATHS)]
    assert pauses == [FIRST_PAUSE_S * 2**n for n in range(MAX_DEATHS)]
    assert restarts.record_death() is None
    assert restarts.rate() == f"{MAX_DEATHS + 1} times in 60 s"


def test_deaths_long_ago_are_forgotten() -> None:
    now = 0.0
    restarts = Restarts(clock=lambda: now)
    for _ in range(5 * MAX_DEATHS):
        assert restarts.record_death() == FIRST_PAUSE_S
        now += WITHIN_S
