"""A worker process as seen by its parent: start it, send calls, wait for replies, kill it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from infra.processes import signal_name
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


class PoolClosed(Exception):
    """The pool of the process is being closed."""


class WorkerProcess:
    """A process with at most one call in progress, for one thread.

    It runs `main(parent)` of `module`, which receives `setup` and then calls, and replies to each with at most
    `reply_bytes`. It ends with the thread that started it. `name` is its name in errors. The process leads its own
    process group, which is killed with it.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], reply_bytes: int, name: str) -> None:
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
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._requests, self._replies):
            os.set_blocking(descriptor, False)
        self._outgoing = memoryview(frame(setup))
        self._incoming = bytearray()
        self._call = 0

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it has exited."""
        return self._process.poll() is not None

    def begin(self, call: int, request: Mapping[str, Any]) -> None:
        """Start call number `call`, from 1, with `request`."""
        self._call = call
        self._outgoing = memoryview(frame({**request, "call": call}))

    def reply(self, limit_s: float, closing: int) -> dict[str, Any]:
        """The next reply to the call, or to the setup before the first call; a process without one is killed.

        The last reply of a process that has ended meanwhile is returned, too. Raises ProcessEnded; TimeoutError after
        `limit_s` seconds; PoolClosed once the descriptor `closing` is at its end.
        """
        deadline = time.monotonic() + limit_s
        try:
            while (reply := self._exchange()) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("no reply within the time limit")
                poller = select.poll()
                poller.register(closing, select.POLLIN)
                poller.register(self._replies, select.POLLIN)
                if self._outgoing:
                    poller.register(self._requests, select.POLLOUT)
                if closing in dict(poller.poll(left * 1000)):
                    raise PoolClosed
        except ProcessEnded as ended:
            self.kill()
            raise ProcessEnded(str(ended) or self._ending()) from None
        except BaseException:
            self.kill()
            raise
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

    def _ending(self) -> str:
        """How the process ended, as text, after `kill`."""
        code = self._process.returncode
        if code is None or code == 0:
            return f"the {self._name} ended its process"
        return f"the {self._name}'s process died of {signal_name(-code)}" if code < 0 else f"exit status {code}"

    def _exchange(self) -> dict[str, Any] | None:
        """Send and read as much as the pipes hold now; the reply once it is complete. Raises ProcessEnded."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError as error:
            raise ProcessEnded from error
        ended = self._read()
        reply = self._complete_reply()
        if reply is None and ended:
            raise ProcessEnded
        if reply is not None and reply.get("call", 0) != self._call:
            raise ProcessEnded(f"the {self._name} wrote into the reply channel")
        return reply

    def _read(self) -> bool:
        """Read the available bytes; return whether the channel is closed."""
        while len(self._incoming) <= self._max_frame_bytes:
            try:
                part = os.read(self._replies, self._max_frame_bytes)
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
