"""The restart policy: growing pauses, and a limit on deaths."""

from __future__ import annotations

from pipelines.run.restarts import FIRST_PAUSE_S, MAX_DEATHS, WITHIN_S, Restarts, exit_text


def test_restarts_double_the_pause_up_to_the_limit() -> None:
    restarts = Restarts(clock=lambda: 0.0)
    pauses = [restarts.record_death() for _ in range(MAX_DEATHS)]
    assert pauses == [FIRST_PAUSE_S * 2**n for n in range(MAX_DEATHS)]
    assert restarts.record_death() is None
    assert restarts.rate() == f"{MAX_DEATHS + 1} times in 60 s"


def test_restarts_ignore_old_deaths() -> None:
    now = 0.0
    restarts = Restarts(clock=lambda: now)
    for _ in range(5 * MAX_DEATHS):
        assert restarts.record_death() == FIRST_PAUSE_S
        now += WITHIN_S


def test_exit_text_names_the_signal_if_it_has_a_name() -> None:
    codes = (1, -9, -35)  # the last one is a real-time signal
    assert [*map(exit_text, codes)] == ["exited with code 1", "was killed by SIGKILL", "was killed by signal 35"]
