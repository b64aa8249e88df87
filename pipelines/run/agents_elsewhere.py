"""Plays episodes of a run on another machine: claims each over HTTP, runs a command for it, and reports its result."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.escaping import print_escaped
from infra.scratch import scratch_folder
from operators.agents.agent_process import (
    REPORT_FILE,
    attempt,
    attempt_folder,
    environment_of,
    note,
    read_report,
    start_command,
)
from pipelines.run.gateway_access import GatewayAccess, GatewayError
from schemas.identity import is_trajectory_id

WAIT_S = 20.0
RETRY_S = 1.0
MAX_RESPONSE_BYTES = 10 * 2**20
_UNAVAILABLE_S = 300.0
"""A gateway that does not respond for so many seconds has ended."""
_DAY_S = 86_400.0
"""The longest time-out of a request."""
_MARGIN_S = 60.0
"""The gateway's own time-out begins once it has read the request: a client must wait longer to get its response."""
_REPEATED = (0, 408, 429, 502, 503, 504)
"""The status of requests that are repeated; 0: there was no response."""
PrintNote = Callable[[str], None]


def print_event(text: str) -> None:
    """Print a line for people."""
    print_escaped(text)


@dataclass
class RemoteAgents:
    """`concurrency` agents of `command`, until the gateway has ended or `episodes` were played (None: no limit)."""

    gateway: GatewayAccess
    command: tuple[str, ...]
    concurrency: int
    timeout_s: float | None
    """Seconds of an attempt, at most those of the run (None: these)."""
    transcripts: Path | None
    episodes: int | None
    note: PrintNote
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Play episodes. Raises GatewayError if the gateway rejects the key, or has ended; OSError for a full disk."""
        if self.transcripts is not None:
            self.transcripts.mkdir(parents=True, exist_ok=True)
        self._left, self._lock, self._end_s = self.episodes, threading.Lock(), 0.0
        self._errors: list[Exception] = []
        self._noted = False
        with scratch_folder("laminar-agents-") as work:
            threads = [threading.Thread(target=self._play, args=(work,), daemon=True) for _ in range(self.concurrency)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join(5.0)
        if self._errors:
            raise self._errors[0]

    def _play(self, work: Path) -> None:
        try:
            while not self.stop.is_set() and self._takes_one():
                claimed = self._claim()
                if claimed is None:
                    return
                self._play_one(claimed, work)
        except (GatewayError, OSError) as error:
            self._errors.append(error)
            self.stop.set()

    def _takes_one(self) -> bool:
        with self._lock:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0

    def _claim(self) -> Mapping[str, Any] | None:
        while not self.stop.is_set():
            body = self._post(self.gateway, "episodes/claim", {"wait_s": WAIT_S}, WAIT_S + _MARGIN_S)
            if body:
                return body
        return None

    def _play_one(self, claimed: Mapping[str, Any], work: Path) -> None:
        try:
            episode, number, key = str(claimed["episode"]), int(claimed["attempt"]), str(claimed["key"])
            task, most_s = dict(claimed["task"]), float(claimed["timeout_s"])
            self._end_s = min(float(claimed["turn_timeout_s"]) + _MARGIN_S, _DAY_S)
        except (KeyError, TypeError, ValueError) as missing:
            raise GatewayError(f"the gateway hands out an episode without {missing}") from missing
        if not is_trajectory_id(episode):
            raise GatewayError(f"the gateway hands out {episode[:40]!r}, which is not an episode")
        transcript = (self.transcripts or work) / f"{episode}.log"
        report: dict[str, Any] = {}
        with attempt_folder(work, f"{episode}.{number}") as own:
            start = start_command(self.command, environment_of(self.gateway.url, key, task, own), transcript)
            error = attempt(start, transcript, min(most_s, self.timeout_s or most_s), self.stop)
            try:
                report = {} if error else read_report(own / REPORT_FILE)
            except ValueError as invalid:
                error = str(invalid)
                note(transcript, error)
        if self.transcripts is None:
            transcript.unlink(missing_ok=True)
        self._report(GatewayAccess(self.gateway.url, key), episode, number, error, report)

    def _report(self, access: GatewayAccess, episode: str, number: int, error: str, report: Mapping[str, Any]) -> None:
        """End the episode, or give it back. An agent that was stopped with this process has not failed."""
        given = {"episode": episode, "attempt": number, "error": None if self.stop.is_set() else error}
        name = f"{episode}.{number}"
        try:
            if error:
                self._post(self.gateway, "episodes/release", given, self._end_s)
            else:
                self._post(access, "episode/end", report, self._end_s)
            self.note(f"{name}: {error or json.dumps(report, ensure_ascii=False)}")
        except GatewayError as refused:
            if refused.status not in (400, 408, 409, 413):
                raise
            self.note(f"{name}: {refused}")  # it has ended, or its report was rejected
            if refused.status != 409 and not error:
                self._fail(access, name, refused)

    def _fail(self, access: GatewayAccess, name: str, refused: GatewayError) -> None:
        """End the episode of an agent whose report was rejected: another attempt would report the same."""
        reason = f"its report was rejected: {refused}"
        if self.transcripts is not None:
            note(self.transcripts / f"{name.rpartition('.')[0]}.log", reason)
        with suppress(GatewayError):  # it has ended
            self._post(access, "episode/end", {"error": reason}, self._end_s)

    def _note_once(self, error: GatewayError) -> None:
        """Print that the gateway does not respond, once."""
        with self._lock:
            before, self._noted = self._noted, self._noted or not error.status
        if self._noted != before:
            self.note(f"{error} It is tried for {_UNAVAILABLE_S:.0f} s")

    def _post(self, access: GatewayAccess, path: str, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The body of the response, empty for status 204; repeated while there is none within `timeout_s`, or the
        gateway cannot respond yet."""
        until: float | None = None
        while True:
            try:
                with access.post(path, body, timeout_s) as response:
                    return _object_in(response.read(MAX_RESPONSE_BYTES), access.url)
            except GatewayError as error:
                if error.status not in _REPEATED or self.stop.is_set():
                    raise
                if error.by_gateway and error.status != 408:  # it runs; a body that is too slow may stay so
                    until = None
                elif until is None:  # counted from the first failure: to wait for a response may take longer
                    until = time.monotonic() + _UNAVAILABLE_S
                    self._note_once(error)
                elif time.monotonic() > until:
                    raise
                self.stop.wait(RETRY_S)


def _object_in(data: bytes, url: str) -> Mapping[str, Any]:
    """The JSON object in the body of a response, empty without a body. Raises GatewayError."""
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        start = data[:40].decode(errors="replace")
        raise GatewayError(f"{url} responds with {start!r}, which is no JSON object: is it the gateway, with /v1?")
    return found
