"""Faults of a `KafkaProxy`: late delivery, delay, duplicate, lost request, lost response.

Every fault records its effect (`hits`, seconds, error codes), so that a test can verify that it had one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from faults.kafka_frames import Api, Request, correlation_of, error_code_of, read_frame
from faults.kafka_proxy import Connection, _Stream

ANSWER_S = 10.0
"""How long to wait for the response to a late request."""


@dataclass(frozen=True)
class Match:
    """Matches requests of `apis` (empty: any) of `transactional_id` (none: any)."""

    apis: Collection[int] = ()
    transactional_id: str | None = None

    def __call__(self, request: Request) -> bool:
        wanted = not self.apis or request.api in self.apis
        own = self.transactional_id in (None, request.transactional_id)
        return wanted and own


class PassingFault:
    """Lets everything pass."""

    def __init__(self) -> None:
        self.hits = 0

    async def on_request(self, connection: Connection, request: Request) -> bool:
        return True

    async def on_response(self, connection: Connection, request: Request, response: bytes) -> bool:
        return True


class RecordedRequests(PassingFault):
    """Records the requests that match, in the order in which they arrive."""

    def __init__(self, match: Match) -> None:
        super().__init__()
        self.match = match
        self.seen: list[Request] = []

    async def on_request(self, connection: Connection, request: Request) -> bool:
        if self.match(request):
            self.seen.append(request)
        return True


When = Callable[[Sequence[Request]], bool]
"""Whether to deliver a late request now, from the client's later requests; the last of them waits for the delivery."""


def before_request(number: int) -> When:
    """Before the client's request of this number, counted from 1 after the late one."""
    return lambda seen: len(seen) == number


def between_offsets_and_outputs(at_most: int = 60) -> When:
    """After the TxnOffsetCommit of a transaction and before a Produce of it, or else before request `at_most`."""

    def when(seen: Sequence[Request]) -> bool:
        apis = [request.api for request in seen]
        transaction = apis[len(apis) - apis[::-1].index(Api.END_TXN) :] if Api.END_TXN in apis else []
        between = apis[-1] == Api.PRODUCE and Api.TXN_OFFSET_COMMIT in transaction
        return between or len(seen) == at_most

    return when


class LateRequest(PassingFault):
    """Holds the first request that matches `held`, resets its client, and delivers it once `when` holds.

    The last request that `when` received waits for the response to the late one: so the late request arrives exactly
    between two requests of its client.
    """

    def __init__(self, held: Match, when: When) -> None:
        super().__init__()
        self.held_match, self.when = held, when
        self.held = threading.Event()
        self.released = threading.Event()
        self.seen: list[Request] = []
        """The requests of the transactional id that came after the held one, until it was delivered."""
        self.answer: int | str | None = None
        """The broker's error code for the late request, or why there is none."""
        self.request: Request | None = None
        self._broker: _Stream | None = None

    async def on_request(self, connection: Connection, request: Request) -> bool:
        if self.request is None:
            if not self.held_match(request):
                return True
            self.request, self._broker = request, connection.detach()
            self.hits += 1
            connection.proxy.note(f"held {request}")
            self.held.set()
            return False
        if self._broker is None or request.transactional_id != self.request.transactional_id:
            return True
        self.seen.append(request)
        if self.when(self.seen):
            await self.deliver(connection)
            connection.proxy.note(f"delivered {self.request} late, before {request}: {self.answer}")
        return True

    async def deliver(self, connection: Connection) -> None:
        """Deliver the held request now, and wait for the response."""
        broker, request = self._broker, self.request
        if broker is None or request is None:
            return
        self._broker = None
        try:
            await broker.send(request.frame, connection.proxy.upstream_pace)
            while correlation_of(response := await asyncio.wait_for(read_frame(broker.reader), ANSWER_S)) != (
                request.correlation
            ):
                pass
            self.answer = error_code_of(request, response)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.answer = repr(error)
        broker.abort()
        self.released.set()

    def check_outcome(self) -> None:
        """Raise AssertionError if the outcome is unknown, or the broker accepted the request in a later session."""
        assert isinstance(self.answer, int), f"the outcome of {self.request} is unknown: {self.answer}"
        apis = [request.api for request in self.seen]
        later = apis[apis.index(Api.INIT_PRODUCER_ID) :] if Api.INIT_PRODUCER_ID in apis else []
        begun = set(later) > {Api.INIT_PRODUCER_ID}  # before, the session may not have its epoch yet
        accepted = self.answer == 0 and self.request is not None and self.request.api != Api.INIT_PRODUCER_ID
        assert not (begun and accepted), f"{self.request} was accepted in a later session, after {self.seen[-1]}"


class Delay(PassingFault):
    """Delays every matching request by `seconds`."""

    def __init__(self, match: Match, seconds: float) -> None:
        super().__init__()
        self.match, self.seconds, self.delayed_s = match, seconds, 0.0

    async def on_request(self, connection: Connection, request: Request) -> bool:
        if self.match(request):
            began = time.monotonic()
            await asyncio.sleep(self.seconds)
            self.hits += 1
            self.delayed_s += time.monotonic() - began
            connection.proxy.note(f"delayed {request} by {time.monotonic() - began:.3f} s")
        return True


class Duplicate(PassingFault):
    """Sends the first `count` matching requests also over another connection, and waits for the response."""

    def __init__(self, match: Match, count: int = 1) -> None:
        super().__init__()
        self.match, self.count = match, count

    async def on_request(self, connection: Connection, request: Request) -> bool:
        if self.hits < self.count and self.match(request):
            self.hits += 1
            twin = await connection.proxy.open_upstream()
            await twin.send(request.frame, connection.proxy.upstream_pace)
            response = await asyncio.wait_for(read_frame(twin.reader), ANSWER_S)
            connection.proxy.note(f"duplicated {request}: {error_code_of(request, response)}")
        return True


class LostRequest(PassingFault):
    """Resets the connection instead of forwarding the first `count` matching requests."""

    def __init__(self, match: Match, count: int = 1) -> None:
        super().__init__()
        self.match, self.count = match, count

    async def on_request(self, connection: Connection, request: Request) -> bool:
        if self.hits >= self.count or not self.match(request):
            return True
        self.hits += 1
        connection.proxy.note(f"lost {request}")
        connection.reset()
        return False


class LostResponse(PassingFault):
    """Resets the connection instead of returning the responses to the first `count` matching requests."""

    def __init__(self, match: Match, count: int = 1) -> None:
        super().__init__()
        self.match, self.count = match, count

    async def on_response(self, connection: Connection, request: Request, response: bytes) -> bool:
        if self.hits >= self.count or not self.match(request):
            return True
        self.hits += 1
        connection.proxy.note(f"lost the response to {request}: {error_code_of(request, response)}")
        connection.reset()
        return False
