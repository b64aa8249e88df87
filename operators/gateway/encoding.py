"""Threads that encode the messages of requests, one request of a holder at a time.

To encode a long text takes seconds, and a thread cannot be cancelled. With threads of their own, long texts do not
delay what the gateway writes to the log; and a client that sends one, goes and sends it again has one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

THREADS = 4


class EncodingThreads:
    """Runs work in `THREADS` threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "encode")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By holder; locked until the thread ends, also if nobody waits for it any more."""

    async def run(self, holder: str, work: Callable[[], T]) -> T:
        """The result of `work`, after the earlier work of `holder`, an episode or PEOPLE.

        Work that has not begun when the caller is cancelled never does.
        """
        turn = self._turns.setdefault(holder, asyncio.Lock())
        await turn.acquire()
        submitted = self._threads.submit(work)
        working = asyncio.wrap_future(submitted)
        working.add_done_callback(lambda _: turn.release())
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            submitted.cancel()
            raise
