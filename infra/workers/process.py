"""A worker process as seen by its parent: start it, send calls, read replies without blocking, kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from infra.sandbox.cgroups import VARIABLE as CGROUP
from infra.workers.frames import PREFIX_BYTES, frame, frame_length

_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", CGROUP)
# As in multiprocessing's spawn, the child has the module path of this process.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[3]).main(int(sys.argv[2]))"
)


class ProcessEnded(Exception):
    """The process has ended or violated the protocol; the message says which."""


class WorkerProcess:
    """A process with at most one call in progress. Not thread-safe.

    It runs `main(parent)` of `module`, which receives `setup` and then calls, and replies to each with at most
    `reply_bytes`. It ends with the thread that started it. `name` is its name in errors. The process leads its own
    process group, which is killed with it.

    For the caller's use: `index` identifies the call in progress (None: idle), `deadline` is the time limit of the call
    or the start on the caller's clock, and `watched` the descriptor on which the caller waits to send.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], deadline: float, reply_bytes: int, name: str) -> None:
        self._max_frame_bytes, self._name = PREFIX_BYTES + reply_bytes, name
        flags = ["-E", "-s", "-W", "ignore", *(["-B"] if sys.dont_write_bytecode else [])]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT, json.dumps(sys.path), str(os.getpid()), module],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=clean_environment(os.environ),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._request_descriptor, self.replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._request_descriptor, self.replies):
            os.set_blocking(descriptor, False)
        self._outgoing = memoryview(frame(setup))
        self._incoming = bytearray()
        self._call = 0
        self.ready = False
        self.index: int | None = None
        self.deadline: float | None = deadline
        self.watched: int | None = None

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether it waits for a call."""
        return self.ready and self.index is None

    @property
    def requests(self) -> int | None:
        """The descriptor to wait on until more can be sent; None if nothing is left to send."""
        return self._request_descriptor if self._outgoing else None

    def has_ended(self) -> bool:
        """Whether it has exited."""
        return self._process.poll() is not None

    def begin(self, index: int, call: int, request: Mapping[str, Any], deadline: float) -> None:
        """Start call number `call` with `request`, which `send` then sends."""
        self.index, self._call, self.deadline = index, call, deadline
        self._outgoing = memoryview(frame({**request, "call": call}))

    def send(self) -> None:
        """Send as much as the pipe accepts now. Raises ProcessEnded."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._request_descriptor, self._outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError as error:
            raise ProcessEnded from error

    def receive(self) -> dict[str, Any] | None:
        """Read what has arrived; return the reply once it is complete and clear the deadline. Raises ProcessEnded.

        The reply of a process that has ended meanwhile is returned, too.
        """
        ended = self._read()
        reply = self._complete_reply()
        if reply is None:
            if ended:
                raise ProcessEnded
            return None
        if self.ready and (self.index is None or reply.get("call") != self._call):
            raise ProcessEnded(f"the {self._name} wrote into the reply channel")
        self.ready, self.deadline = self.ready or "ready" in reply, None
        return reply

    def kill(self) -> None:
        """Kill the process and its process group, and wait for its end."""
        # Even if the leader has ended, its group id is not reused before wait().
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # not yet the leader of its group, or already gone
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ending(self) -> str:
        """How the process ended, as text, after `kill`."""
        code = self._process.returncode
        if code is None or code == 0:
            return f"the {self._name} ended its process"
        try:
            return (
                f"the {self._name}'s process died of {signal.Signals(-code).name}"
                if code < 0
                else f"exit status {code}"
            )
        except ValueError:
            return f"the {self._name}'s process died of signal {-code}"

    def _read(self) -> bool:
        """Read the available bytes; return whether the channel is closed."""
        while len(self._incoming) <= self._max_frame_bytes:
            try:
                part = os.read(self.replies, self._max_frame_bytes)
            except BlockingIOError:
                return False
            if not part:
                return True
            self._incoming += part
        return False

    def _complete_reply(self) -> dict[str, Any] | None:
        if len(self._incoming) < PREFIX_BYTES:
            return None
        end = PREFIX_BYTES + frame_length(self._incoming)
        if end > self._max_frame_bytes:
            raise ProcessEnded(f"the {self._name} wrote into the reply channel")
        if len(self._incoming) < end:
            return None
        try:
            reply = json.loads(self._incoming[PREFIX_BYTES:end])
        except ValueError as error:
            raise ProcessEnded(f"the {self._name} wrote into the reply channel") from error
        del self._incoming[:end]
        if not isinstance(reply, dict):
            raise ProcessEnded(f"the {self._name} wrote into the reply channel")
        return reply


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a worker needs: no credentials, and one thread for numeric libraries."""
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"}
