"""The members' side of stage groups: serves the stages of a process's replicas to the leaders of their groups.

A leader opens a control connection to each member, on which it sends plans of steps and changes of KV rows, in order,
and one for heartbeats of both ends: a leader or a member whose process or machine hangs is lost like one that has
ended. Hidden states travel along another chain of connections: from the leader to the first member, from member to
member, and from the last one back. A member that loses a neighbour keeps its stage and its KV until the leader has
fetched it, or closes the control connection. It may be waiting for a neighbour that hangs: a heartbeat then says that
the group is broken, and the member stops waiting.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from infra.models.partial_weights import PartsMissing
from infra.transport.array_messages import ArrayMessage, receive_message, send_message
from infra.transport.connection import Connection, interrupt
from infra.transport.frames import MAX_ARRAY_BYTES, FrameKind, ProtocolError, TransportError, receive, send
from infra.transport.handshake import connect, expect
from infra.transport.kv_transfer import KVTransfers, encode_parts
from operators.rollout.kv_rows import RowCopy
from operators.rollout.staged.member import StageMember, StageRefused
from operators.rollout.staged.stage import PLAN_ARRAYS, StageModel, decode_plan
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

CONNECT_S = 5.0
INPUT_TIMEOUT_S = 20.0
"""Seconds in which the stage before must connect."""
HEARTBEAT_S = 2.0
"""Seconds between the heartbeats of a leader and a member."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Seconds without one after which the other end is taken as lost."""


@dataclass(eq=False)
class StageInput:
    """A connection over which a stage receives hidden states; `done` ends the thread that holds it."""

    connection: Connection
    done: threading.Event = field(default_factory=threading.Event)


class StageService:
    """The stages of this process, reachable through the server of `transfers`; `add` registers its replicas."""

    def __init__(self, transfers: KVTransfers) -> None:
        self.transfers = transfers
        self._members: dict[int, StageMember] = {}
        self._inputs: dict[tuple[str, int], StageInput] = {}
        self._watched: dict[tuple[str, int], _Watched] = {}
        """By group and index: the stages whose leaders send heartbeats."""
        self._changed = threading.Condition()
        transfers.handlers[FrameKind.STAGE] = self._serve
        transfers.handlers[FrameKind.STAGE_INPUT] = self._hold_input
        transfers.handlers[FrameKind.STAGE_WATCH] = self._watch

    def add(self, member: StageMember) -> None:
        """Serve stages of this replica."""
        self._members[member.replica] = member

    def connect(self, address: str, kind: FrameKind, **body: object) -> Connection:
        """Open a connection of `kind` to the process at `address`. Raises TransportError."""
        transfers = self.transfers
        endpoint = transfers.endpoint
        connection = connect(address, transfers.run, endpoint.token, -1, CONNECT_S, endpoint.tls)
        try:
            send(connection, kind, **body)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def take_input(self, group: str, index: int) -> StageInput:
        """The connection over which stage `index` of `group` receives hidden states. Raises TransportError."""
        with self._changed:
            if not self._changed.wait_for(lambda: (group, index) in self._inputs, INPUT_TIMEOUT_S):
                raise TransportError(f"no hidden states for stage {index} of group {group}: nothing has connected")
            return self._inputs.pop((group, index))

    def _hold_input(self, connection: Connection, body: Mapping[str, Any]) -> None:
        """Keep an input connection open until its stage has ended."""
        group, index = body.get("group"), body.get("index")
        if not isinstance(group, str) or not isinstance(index, int):
            raise ProtocolError("hidden states without group and index")
        held = StageInput(connection)
        with self._changed:
            self._inputs[group, index] = held
            self._changed.notify_all()
        held.done.wait(INPUT_TIMEOUT_S)
        with self._changed:
            unused = self._inputs.get((group, index)) is held
            if unused:
                del self._inputs[group, index]
        if not unused:
            held.done.wait()

    def _watch(self, connection: Connection, body: Mapping[str, Any]) -> None:
        """Reply to the heartbeats of a leader; without them its stage ends. At one `broken` it stops waiting."""
        key, watched = (str(body.get("group"))[:80], _integer(body, "index")), _Watched()
        with self._changed:
            self._watched[key] = watched
            self._changed.notify_all()
        try:
            while True:
                connection.settimeout(HEARTBEAT_TIMEOUT_S)
                heartbeat = receive(connection)
                expect(heartbeat, FrameKind.STAGE_WATCH)
                if heartbeat.body.get("broken"):  # has no reply
                    watched.break_stages()
                else:
                    send(connection, FrameKind.STAGE_WATCH)
        finally:
            with self._changed:
                if self._watched.get(key) is watched:
                    del self._watched[key]
            for control in watched.controls:
                interrupt(control)
            watched.break_stages()

    def _serve(self, connection: Connection, body: Mapping[str, Any]) -> None:
        """One stage, from its leader's request to the end of the control connection."""
        group, member = str(body.get("group"))[:80], self._members.get(_integer(body, "replica"))
        output = None
        try:
            if member is None:
                raise StageRefused(f"replica {body.get('replica')!r} is not hosted here")
            key = group, _integer(body, "index")
            with self._changed:
                if not self._changed.wait_for(lambda: key in self._watched, CONNECT_S):
                    raise StageRefused(f"its leader sent no heartbeat for {CONNECT_S:g} s")
                watched = self._watched[key]
                watched.controls.append(connection)
            version = PolicyVersion.parse(str(body.get("version")))
            layers = range(_integer(body, "first"), _integer(body, "end"))
            shape = _integer(body, "rows"), _integer(body, "context")
            stage = member.open(group, _integer(body, "incarnation"), version, layers, *shape)
        except (StageRefused, PartsMissing, ValueError, TransportError) as error:
            self._send(connection, "refused", reason=str(error)[:1000])
            return
        try:
            index, next_index = key[1], _integer(body, "next_index")
            output = self.connect(str(body.get("next")), FrameKind.STAGE_INPUT, group=group, index=next_index)
            self._send(connection, "ready")
            served = _ServedStage(self, connection, stage, group, version, index, output)
            watched.stages.append(served)
            served.run()
        finally:
            if output is not None:
                output.close()
            member.end(group)

    def _send(self, connection: Connection, kind: str, **body: Any) -> None:
        send_message(connection, self.transfers.sending, kind, **body)


@dataclass(eq=False)
class _ServedStage:
    """The messages of one control connection, applied to `stage` in their order."""

    service: StageService
    control: Connection
    stage: StageModel
    group: str
    version: PolicyVersion
    index: int
    output: Connection
    _input: StageInput | None = None
    _broken: bool = False

    def run(self) -> None:
        """Serve until the leader closes the connection."""
        try:
            while True:
                message = receive_message(self.control, self.service.transfers.receiving, MAX_ARRAY_BYTES)
                with torch.inference_mode():
                    self._apply(message)
        except TransportError as error:
            log.info("the stage of group %s has ended: %s", self.group, error)
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            log.warning("the stage of group %s has ended: its leader sent an invalid message: %s", self.group, error)
        finally:
            self.stop_waiting()

    def _apply(self, message: ArrayMessage) -> None:
        arrays = message.arrays
        match message.kind:
            case "step":
                if not self._broken:
                    self._step(message)
            case "copy":
                self.stage.slots.copy([RowCopy(*copy) for copy in self._rows_of(arrays[0]).tolist()])
            case "permute":
                self.stage.slots.permute(self._rows_of(arrays[0]), _integer(message.body, "width"))
            case "clear":
                self.stage.slots.clear(self._rows_of(arrays[0]).tolist())
            case "offer":
                self._offer(_integer(message.body, "row"), _integer(message.body, "tokens"))
            case "write":
                self._write(message)
            case "ping":
                self._reply("pong", broken=self._broken)
            case other:
                raise ProtocolError(f"unknown message {other[:20]!r} for a stage")

    def _step(self, message: ArrayMessage) -> None:
        """Compute a step on the hidden states that the stage before sends, and pass the result on."""
        try:
            if self._input is None:
                self._input = self.service.take_input(self.group, self.index)
                if self._broken:  # `stop_waiting` did not find the input
                    raise TransportError("the group is broken")
            step, blocks = decode_plan(message.arrays[:PLAN_ARRAYS], self.stage.rows, self.stage.context)
            stored = None if len(message.arrays) == PLAN_ARRAYS else message.arrays[PLAN_ARRAYS].tolist()
            received = receive_message(self._input.connection, self.service.transfers.receiving, MAX_ARRAY_BYTES)
            x = self.stage.run(self.stage.from_bytes(received.arrays[0]), step, blocks, stored)
            if message.body.get("forward"):
                send_message(self.output, self.service.transfers.sending, "hidden", [self.stage.to_bytes(x)])
        except (TransportError, RuntimeError, IndexError, ValueError) as error:
            log.warning("stage %d of group %s failed: %s", self.index, self.group, error)
            self.stop_waiting()

    def _offer(self, row: int, tokens: int) -> None:
        """Offer the KV of a row to the next owner of its trajectory."""
        data = self.stage.slots.export_row(row, tokens).data
        manifest = self.service.transfers.offer(self.version, tokens, data)
        listed = b"" if manifest is None else bytes(encode_parts([manifest]))
        send_message(self.control, self.service.transfers.sending, "offered", [np.frombuffer(listed, np.uint8)])

    def _write(self, message: ArrayMessage) -> None:
        """Store the KV of a row, all layers of this stage one after the other."""
        body, count = message.body, len(self.stage.slots.layers)
        data = memoryview(message.arrays[0].reshape(-1).copy().data)
        each = len(data) // max(1, count)
        layers = {layer: data[layer * each : (layer + 1) * each] for layer in range(count)}
        row, layout, tokens = (_integer(body, name) for name in ("row", "layout", "tokens"))
        stored = self.stage.slots.write_row(row, layout, tokens, layers)
        self._reply("written", layers=len(stored))

    def _rows_of(self, array: np.ndarray) -> np.ndarray:
        if array.dtype != np.int64 or array.ndim > 2:
            raise ProtocolError("rows that are not int64")
        if array.size and array.min() < 0:
            raise ProtocolError(f"row {array.min()}")
        return array

    def _reply(self, kind: str, **body: Any) -> None:
        send_message(self.control, self.service.transfers.sending, kind, **body)

    def stop_waiting(self) -> None:
        """Close the connections to both neighbours, which then do the same: so the leader notices. From any thread."""
        self._broken = True
        interrupt(self.output)
        if self._input is not None:
            interrupt(self._input.connection)
            self._input.done.set()


@dataclass(eq=False)
class _Watched:
    """What ends with the heartbeats of a leader: the control connection of its stage, and what the stage waits for."""

    controls: list[Connection] = field(default_factory=list)
    stages: list[_ServedStage] = field(default_factory=list)

    def break_stages(self) -> None:
        """Let the stage stop waiting for its neighbours."""
        for stage in self.stages:
            stage.stop_waiting()


def _integer(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value < -1:
        raise ProtocolError(f"a message for a stage has no valid {name}: {json.dumps(value)[:40]}")
    return value
