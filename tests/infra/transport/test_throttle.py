"""The token bucket of a link, with the clock and sleep of the test."""

from __future__ import annotations

import threading

import pytest

from infra.transport.peer import RESPONSE_TIMEOUT_S
from infra.transport.throttle import Link


class Clock:
    """A clock that advances only in `sleep` or when the test sets `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(
    ("rate", "calls", "slept"),
    [
        (100.0, [(0, 50), (0, 50)], [0.5, 0.5]),  # one after the other
        (100.0, [(0, 50), (10, 50)], [0.5, 0.45]),  # at most 0.05 s of the rate is saved
        (100.0, [(0, 100), (0.25, 25)], [1.0, 0.2]),
        (100.0, [(0, 50), (0.02, 50)], [0.5, 0.48]),  # a slightly late start loses nothing
        (50.0, [(0, 0)], []),
        (None, [(0, 1 << 40), (0, 5)], []),
    ],
)
def test_link_sleeps_to_keep_its_rate(rate: float | None, calls: list[tuple[float, int]], slept: list[float]) -> None:
    clock = Clock()
    link = Link(rate, lambda: clock.now, clock.sleep)
    for idle, count in calls:
        clock.now += idle
        link.acquire(count)
    assert clock.slept == pytest.approx(slept)
    assert link.bytes_passed == sum(count for _, count in calls)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_link_rejects_a_rate_that_is_not_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Link(rate)


@pytest.mark.parametrize("rate", [1.0, 1000.0, 87_000.0, 1e6, float("inf")])
def test_link_passes_a_slice_before_its_peer_gives_up(rate: float) -> None:
    step = Link(rate).max_slice
    assert step
    assert 1 <= step <= 256 << 10
    assert step / rate <= max(1 / rate, RESPONSE_TIMEOUT_S / 10)


def test_link_passes_lower_turns_first() -> None:
    """One transfer passes while two wait; the later waiter has the lower turn."""
    passed: list[int] = []
    first, asleep = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:  # of one transfer after the other
        passed.append(int(threading.current_thread().name))
        asleep.set()
        assert first.wait(60)

    link = Link(100.0, lambda: 0.0, sleep)
    threads = [threading.Thread(target=link.acquire, args=(1, turn), name=str(turn)) for turn in (0, 7, 3)]
    threads[0].start()
    assert asleep.wait(60)
    for waiting, thread in enumerate(threads[1:], 1):
        thread.start()
        while len(link._waiting) < waiting:
            pass
    first.set()
    for thread in threads:
        thread.join()
    assert passed == [0, 3, 7]
