"""A link's token bucket, as a table of what passes when: its clock and its sleep are the test's."""

from __future__ import annotations

import threading

import pytest

from infra.transport.throttle import Link


class Clock:
    """Time that passes only when somebody sleeps, or the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(
    ("rate", "takes", "slept"),
    [
        (100.0, [(0, 50), (0, 50)], [0.5, 0.5]),  # one after the other
        (100.0, [(0, 50), (10, 50)], [0.5, 0.45]),  # a twentieth of a second is saved up, no more
        (100.0, [(0, 100), (0.25, 25)], [1.0, 0.2]),
        (100.0, [(0, 50), (0.02, 50)], [0.5, 0.48]),  # who comes a little late loses nothing
        (50.0, [(0, 0)], []),
        (None, [(0, 1 << 40), (0, 5)], []),
    ],
)
def test_what_passes_when(rate: float | None, takes: list[tuple[float, int]], slept: list[float]) -> None:
    clock = Clock()
    link = Link(rate, lambda: clock.now, clock.sleep)
    for idle, count in takes:
        clock.now += idle
        link.take(count)
    assert clock.slept == pytest.approx(slept)
    assert link.passed == sum(count for _, count in takes)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_passes_something(rate: float) -> None:
    with pytest.raises(ValueError, match="passes more than"):
        Link(rate)


def test_a_lower_turn_passes_first() -> None:
    """One is passing while two wait; the later one's turn is the earlier."""
    passed: list[int] = []
    first, asleep = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        asleep.set()
        assert first.wait(10)

    link = Link(100.0, lambda: 0.0, sleep)

    def pass_through(turn: int) -> None:
        link.take(1, turn)
        passed.append(turn)

    threads = [threading.Thread(target=pass_through, args=(turn,)) for turn in (0, 7, 3)]
    threads[0].start()
    assert asleep.wait(10)
    for waiting, thread in enumerate(threads[1:], 1):
        thread.start()
        while len(link._waiting) < waiting:
            pass
    first.set()
    for thread in threads:
        thread.join()
    assert passed == [0, 3, 7]
