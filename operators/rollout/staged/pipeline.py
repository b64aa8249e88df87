"""The leader's side of a stage group: its connections to the members, and the passes that go through them.

Control connections lead to every member; hidden states go to the first member and come back from the last. A thread
receives what comes back, so that a member never waits for a leader that is sending. Members compute one part of a step
while the leader computes the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from infra.runners.liveness import LIVENESS
from infra.transport.array_messages import ArrayMessage, receive_message, send_message
from infra.transport.connection import Connection, interrupt
from infra.transport.frames import MAX_ARRAY_BYTES, FrameKind, TransportError, receive, send
from infra.transport.kv_transfer import decode_parts
from operators.rollout.kv_rows import RowCopy
from operators.rollout.runner import RunnerLost
from operators.rollout.staged.service import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, StageInput, StageService
from schemas.records import KVManifest, StageGroup
from schemas.records import Stage as StagePlace

PROBE_S = 5.0
"""Seconds in which a member has to answer after the group has broken."""
RESULT_S = 120.0
"""Seconds after which a pass is taken as lost: of a member that sends heartbeats, but whose computation hangs."""


class GroupFailed(RunnerLost):
    """A group could not be formed, or has lost members; `lost` names the replicas that failed."""

    def __init__(self, reason: str, lost: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.lost = tuple(lost)


class _Member:
    """The connections to one member: control, and `watch` for heartbeats."""

    def __init__(self, place: StagePlace, control: Connection, watch: Connection) -> None:
        self.place, self.control, self.watch = place, control, watch
        self.layers = range(place.first, place.end)
        self.alive = True
        self._sending = threading.Lock()

    def send_heartbeat(self, **body: bool) -> None:
        """Send a heartbeat; with `broken=True` the member stops waiting for its neighbours. Raises TransportError."""
        with self._sending:
            send(self.watch, FrameKind.STAGE_WATCH, **body)

    def close(self) -> None:
        """Close both connections: the member drops its stage."""
        interrupt(self.watch)
        self.control.close()


class StagePipeline:
    """The members of the group that `order` describes, each with `rows` rows of `context` tokens.

    Opening it takes as long as the slowest member needs to load its layers. Raises GroupFailed.
    """

    def __init__(self, service: StageService, order: StageGroup, rows: int, context: int) -> None:
        self.order, self._service, self.transfers = order, service, service.transfers
        self._results: queue.Queue[ArrayMessage | None] = queue.Queue()
        self._closed = threading.Event()
        self._first: Connection | None = None
        self._returned: StageInput | None = None
        self.members: list[_Member] = []
        with ThreadPoolExecutor(max(1, len(order.stages) - 1), "open stages") as pool:
            opened = [pool.submit(self._open, index, rows, context) for index in range(1, len(order.stages))]
            errors = []
            for future in opened:
                try:
                    self.members.append(future.result())
                except GroupFailed as error:
                    errors.append(error)
        try:
            if errors:
                raise GroupFailed("; ".join(map(str, errors)), [lost for error in errors for lost in error.lost])
            if self.members:
                self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def broken(self) -> bool:
        """Whether a member has been lost."""
        return any(not member.alive for member in self.members)

    def _open(self, index: int, rows: int, context: int) -> _Member:
        """Ask the member of stage `index` to load its layers; returns its connections, watched."""
        order, place = self.order, self.order.stages[index]
        next_index = (index + 1) % len(order.stages)
        try:
            watch = self._service.connect(place.address, FrameKind.STAGE_WATCH, group=order.group, index=index)
        except TransportError as error:
            raise GroupFailed(f"replica {place.replica} at {place.address}: {error}", [place.replica]) from error
        try:
            control = self._service.connect(
                place.address,
                FrameKind.STAGE,
                replica=place.replica,
                incarnation=place.incarnation,
                group=order.group,
                version=str(order.version),
                first=place.first,
                end=place.end,
                rows=rows,
                context=context,
                index=index,
                next=order.stages[next_index].address,
                next_index=next_index,
            )
        except TransportError as error:
            watch.close()
            raise GroupFailed(f"replica {place.replica} at {place.address}: {error}", [place.replica]) from error
        member = _Member(place, control, watch)
        LIVENESS.start_thread(f"watch replica {place.replica}", partial(self._watch, member))
        try:
            reply = receive_message(control, self.transfers.receiving, MAX_ARRAY_BYTES)
        except TransportError as error:
            member.close()
            raise GroupFailed(f"replica {place.replica}: {error}", [place.replica]) from error
        if reply.kind != "ready":
            member.close()
            raise GroupFailed(f"replica {place.replica}: {str(reply.body.get('reason'))[:300]}", [place.replica])
        return member

    def _watch(self, member: _Member) -> None:
        """Exchange heartbeats with `member`. Without them it is lost, and what waits for it fails."""
        member.watch.settimeout(HEARTBEAT_TIMEOUT_S)
        with suppress(TransportError, OSError):
            while not self._closed.wait(HEARTBEAT_S):
                member.send_heartbeat()
                receive(member.watch)
        member.watch.close()
        member.alive = False
        interrupt(member.control)
        if self._first is not None:
            interrupt(self._first)
        self._results.put(None)

    def _connect(self) -> None:
        """Open the connection to the first member, and take that from the last one."""
        group, first = self.order.group, self.order.stages[1]
        try:
            self._first = self._service.connect(first.address, FrameKind.STAGE_INPUT, group=group, index=1)
            self._returned = self._service.take_input(group, 0)
        except TransportError as error:
            raise GroupFailed(f"the stages of group {group} are not connected: {error}") from error
        LIVENESS.start_thread("hidden states", self._receive)

    def _receive(self) -> None:
        assert self._returned is not None
        with suppress(TransportError):
            while True:
                self._results.put(receive_message(self._returned.connection, self.transfers.receiving, MAX_ARRAY_BYTES))
        self._results.put(None)

    # -- passes -------------------------------------------------------------------------------------------------------

    def send_step(
        self, plan: Sequence[np.ndarray], hidden: np.ndarray, *, returns: bool, stored: Sequence[int] | None = None
    ) -> None:
        """Send a pass through the members; with `stored` only as far as the last of these layers. Raises GroupFailed.

        A pass that `returns` has a `result`.
        """
        if self.broken:
            raise self._failure("a member did not accept a change of its rows")
        involved = self.members if stored is None else [m for m in self.members if m.layers.start <= max(stored)]
        arrays = [*plan] if stored is None else [*plan, np.array(stored, np.int64)]
        for number, member in enumerate(involved):
            last = number == len(involved) - 1
            self._send(member, "step", arrays, forward=not last or (returns and stored is None))
        if involved:
            assert self._first is not None
            try:
                send_message(self._first, self.transfers.sending, "hidden", [hidden])
            except TransportError as error:
                raise self._failure(str(error)) from error

    def result(self) -> np.ndarray:
        """The hidden states of the earliest pass whose result was not taken. Raises GroupFailed."""
        try:
            message = self._results.get(timeout=RESULT_S)
        except queue.Empty:
            message = None
        if message is None or len(message.arrays) != 1:
            raise self._failure("the last stage sent no hidden states")
        return message.arrays[0]

    # -- KV rows ------------------------------------------------------------------------------------------------------

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Copy between rows, at every member. The next step raises GroupFailed if one is gone."""
        self._send_all("copy", [np.array(copies, np.int64).reshape(-1, 3)])

    def permute(self, order: np.ndarray, width: int) -> None:
        """Reorder rows, at every member, as `copy`."""
        self._send_all("permute", [order.astype(np.int64)], width=width)

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows, at every member, as `copy`."""
        self._send_all("clear", [np.array(rows, np.int64)])

    def offer(self, member: _Member, row: int, tokens: int) -> KVManifest | None:
        """Where the KV of a row's first tokens can be fetched from `member`; None if it cannot offer it."""
        try:
            send_message(member.control, self.transfers.sending, "offer", row=row, tokens=tokens)
            listed = decode_parts(memoryview(b"".join(array.data for array in self._reply(member, "offered").arrays)))
        except TransportError:
            member.alive = False
            return None
        return listed[0] if listed else None

    def write(self, member: _Member, row: int, layout: int, tokens: int, data: Sequence[memoryview]) -> bool:
        """Store the KV of a row at `member`, one element of `data` for each of its layers; whether it was stored."""
        array = np.frombuffer(b"".join(data), np.uint8)
        try:
            send_message(
                member.control, self.transfers.sending, "write", [array], row=row, layout=layout, tokens=tokens
            )
            return bool(self._reply(member, "written").body.get("layers") == len(member.layers))
        except TransportError as error:
            raise self._failure(str(error)) from error

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the group: the members drop their stages."""
        self._closed.set()
        for member in self.members:
            member.close()
        if self._first is not None:
            self._first.close()
        if self._returned is not None:
            interrupt(self._returned.connection)
            self._returned.done.set()

    def _send_all(self, kind: str, arrays: Sequence[np.ndarray], **body: Any) -> None:
        for member in self.members:
            try:
                send_message(member.control, self.transfers.sending, kind, arrays, **body)
            except TransportError:  # the others need the change in any case: their KV will be used
                member.alive = False

    def _send(self, member: _Member, kind: str, arrays: Sequence[np.ndarray], **body: Any) -> None:
        try:
            send_message(member.control, self.transfers.sending, kind, arrays, **body)
        except TransportError as error:
            raise self._failure(str(error)) from error

    def _reply(self, member: _Member, kind: str) -> ArrayMessage:
        message = receive_message(member.control, self.transfers.receiving, MAX_ARRAY_BYTES)
        if message.kind != kind:
            raise TransportError(f"replica {member.place.replica} replied {message.kind[:20]!r}, expected {kind!r}")
        return message

    def _failure(self, reason: str) -> GroupFailed:
        """Find out which members are gone; the others keep their KV."""
        if self._first is not None:
            interrupt(self._first)
        for member in self.members:
            with suppress(TransportError):  # it may wait for a neighbour that hangs, and could not reply
                member.send_heartbeat(broken=True)
        for member in self.members:
            member.control.settimeout(PROBE_S)
            try:
                send_message(member.control, self.transfers.sending, "ping")
                self._reply(member, "pong")
            except TransportError:
                member.alive = False
        lost = [member.place.replica for member in self.members if not member.alive]
        return GroupFailed(f"{reason}; replicas gone: {lost or 'none'}", lost)
