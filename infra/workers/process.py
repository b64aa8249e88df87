"""One worker process, seen from who uses it: start it, send it a call, read its reply without waiting, end it."""

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
# As multiprocessing's spawn does: the child finds its modules where this process finds them.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[3]).main(int(sys.argv[2]))"
)


class ProcessEnded(Exception):
    """The process is gone or talks nonsense; the message says which."""


class WorkerProcess:
    """A process with at most one call under way. Not thread-safe.

    It runs `main(parent)` of `module`, which is sent `setup` and then calls, and answers each in `reply_bytes` at most.
    It ends with the thread that started it. `name` is what errors call it.

    The caller's own: `index`, by which it knows the call under way (None: idle), `deadline`, until when the call or the
    start must be done, by its clock, and `watched`, the descriptor on which it waits for room. The process leads a
    process group of its own, which ends with it.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], deadline: float, reply_bytes: int, name: str) -> None:
        self._most, self._name = PREFIX_BYTES + reply_bytes, name
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
        self._requests, self.replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._requests, self.replies):
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
        """Its process id, which is its process group's too."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether it waits for a call."""
        return self.ready and self.index is None

    @property
    def requests(self) -> int | None:
        """The descriptor to wait on for room, while there is something left to send."""
        return self._requests if self._outgoing else None

    def has_ended(self) -> bool:
        """Whether it has exited."""
        return self._process.poll() is not None

    def begin(self, index: int, call: int, request: Mapping[str, Any], deadline: float) -> None:
        """Give it `request`, which is call number `call`; `send` sends it."""
        self.index, self._call, self.deadline = index, call, deadline
        self._outgoing = memoryview(frame({**request, "call": call}))

    def send(self) -> None:
        """Send what there is room for now. Raises ProcessEnded."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError as error:
            raise ProcessEnded from error

    def receive(self) -> dict[str, Any] | None:
        """Take what has come. The reply once that is complete; then nothing is due any more. Raises ProcessEnded.

        The last reply of a process that has ended since is a reply, too.
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
        """End it and its process group, and wait until it is gone."""
        # Even where the leader has ended, its group's id is not given away before wait().
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # not yet leader of its group, or already gone
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ending(self) -> str:
        """How it ended, for people, once `kill` has been called."""
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
        """Take in what there is; whether nothing more will come."""
        while len(self._incoming) <= self._most:
            try:
                part = os.read(self.replies, self._most)
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
        if end > self._most:
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
    """The few variables that a worker needs: no credentials, and one thread for libraries that ask how many."""
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"}
