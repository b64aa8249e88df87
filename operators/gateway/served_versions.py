"""Requests of people: an engine in a process of its own answers them, under any weight version of this machine.

The process starts with the first request, has a low priority, and ends after a while without requests, so that
training does not notice it. Its requests are in no log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.processes import die_with_parent_command, last_line
from operators.gateway.errors import ApiError, invalid
from operators.gateway.play import RecordedResponse

log = logging.getLogger(__name__)

MODEL = "laminar"
IDLE_S = 300.0
"""The process ends after so many seconds without a request."""
TIMEOUT_S = 600.0
_LINE_BYTES = 16 * 2**20
_END: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ServedSampling:
    """What of a request shapes its response."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0


def version_name(model: str) -> str:
    """The weight version that `model` names: `laminar`, `laminar:latest` or `laminar:1.120`.

    Raises ApiError.
    """
    name, _, version = model.partition(":")
    if name != MODEL:
        wanted = f"{MODEL}:latest, or one version, such as {MODEL}:1.120"
        raise ApiError(404, f"there is no model {model[:80]!r}: use {wanted}", code="model_not_found", param="model")
    return version or "latest"


@dataclass
class _Process:
    """A running process, and the requests that wait for it: a queue of its events each."""

    process: asyncio.subprocess.Process
    events: dict[str, asyncio.Queue[Mapping[str, Any]]] = field(default_factory=dict)


class ServedVersions:
    """Serves requests by the process of `command`, `most` at a time; its log is appended to `log_file`.

    The process gets `setup`, a line, before the first request.

    A request whose response does not grow for `timeout_s` seconds fails. The process writes to the folder `work`, which
    is removed once it has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        most: int,
        log_file: Path,
        idle_s: float = IDLE_S,
        timeout_s: float = TIMEOUT_S,
        work: Path | None = None,
        setup: str | None = None,
    ) -> None:
        self._work, self._setup = work, setup
        self._command, self._log_file, self._idle_s, self._timeout_s = command, log_file, idle_s, timeout_s
        self._places = asyncio.Semaphore(most)
        self._number = 0
        self._running: _Process | None = None
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow(
        self, version: str, tokens: list[int], sampling: ServedSampling
    ) -> AsyncGenerator[RecordedResponse]:
        """The response so far, at each change; the last one has a finish reason. Raises ApiError."""
        async with self._places:
            running = await self._process()
            name = self._next_name()
            events = running.events[name] = asyncio.Queue()
            order = {"id": name, "version": version, "tokens": tokens, **asdict(sampling)}
            try:
                self._write(running, json.dumps(order))
                drawn: list[int] = []
                logprobs: list[float] = []
                while True:
                    event = await self._event(events)
                    if event.get("finish") == "failed":
                        raise invalid(f"the request cannot run: {event.get('error')}", "model")
                    drawn += event["tokens"]
                    logprobs += event["logprobs"]
                    reason = event.get("finish") or ""
                    yield RecordedResponse(list(drawn), list(logprobs), len(tokens), 0, reason)
                    if reason:
                        return
            finally:
                if running.events.pop(name, None) is not None and running is self._running:
                    self._write(running, json.dumps({"cancel": name}))

    async def versions(self) -> list[str]:
        """The weight versions that can be served now, oldest first. Raises ApiError."""
        running = await self._process()
        name = self._next_name()
        events = running.events[name] = asyncio.Queue()
        try:
            self._write(running, json.dumps({"id": name, "list": True}))
            event = await self._event(events)
        finally:
            running.events.pop(name, None)
        return list(event["versions"])

    def close(self) -> None:
        """End the process."""
        if self._running is not None:
            self._stop(self._running)

    async def _event(self, events: asyncio.Queue[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The next event of a request. Raises ApiError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                event = await events.get()
        except TimeoutError as error:
            raise ApiError(504, f"no response within {self._timeout_s:g} s", "timeout") from error
        if event is _END:
            log_file = self._log_file
            reason = f"last line of its log, {log_file}: {last_line(log_file)}"
            raise ApiError(503, f"the serving process has ended; repeat the request ({reason})", "server_error")
        return event

    def _next_name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    async def _process(self) -> _Process:
        async with self._starting:
            if self._running is None:
                with self._log_file.open("ab") as output:
                    process = await asyncio.create_subprocess_exec(
                        *die_with_parent_command(list(self._command)),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        start_new_session=True,
                        limit=_LINE_BYTES,
                    )
                self._running = _Process(process)
                if self._setup is not None:
                    self._write(self._running, self._setup)
                task = asyncio.create_task(self._read(self._running))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            return self._running

    async def _read(self, running: _Process) -> None:
        """Distribute the events of a process until it ends, or has no requests for `idle_s` seconds."""
        assert running.process.stdout is not None
        try:
            while True:
                try:
                    async with asyncio.timeout(self._idle_s):
                        line = await running.process.stdout.readline()
                except TimeoutError:
                    if running.events:
                        continue
                    break
                if not line:
                    log.warning("the serving process has ended: see %s", self._log_file)
                    break
                event = json.loads(line)
                if (events := running.events.get(event["id"])) is not None:
                    events.put_nowait(event)
        finally:
            if self._running is running:
                self._running = None
            self._stop(running)
            for events in running.events.values():
                events.put_nowait(_END)
            await running.process.wait()

    def _stop(self, running: _Process) -> None:
        if running.process.returncode is None:  # else its number may be that of another process group
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    def _write(self, running: _Process, line: str) -> None:
        assert running.process.stdin is not None
        if not running.process.stdin.is_closing():
            running.process.stdin.write(line.encode() + b"\n")
