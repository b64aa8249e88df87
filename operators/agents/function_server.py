"""Runs an agent's function in a forked process for each episode, so that its libraries are imported once.

`python -m operators.agents.function_server module:function` reads a JSON line for each episode from its standard input,
and writes a line when the process of one has started or ended. `FunctionServer` is the other end.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from infra.name_lookup import member_of
from infra.processes import die_with_parent_command
from infra.workers.limits import die_with, lower_limit

REPORT_FIELDS = {"reward", "rewards", "answer"}
"""What an agent may report."""
MAX_RETRIES = 10
"""Of the client: it outlasts a restart of the gateway."""
_START_S = 120.0
_REAP_S = 0.01
_WARM_S = 10.0


class FunctionProcess:
    """The process of one episode; `code` is its exit code, None while it runs."""

    def __init__(self) -> None:
        self.pid = 0
        self.code: int | None = None
        self.changed = threading.Condition()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.code

    def kill(self) -> None:
        """Kill it and the processes in its group, and wait until it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            if self.pid and self.code is None:
                try:
                    os.killpg(self.pid, signal.SIGKILL)
                except ProcessLookupError:  # it has no session of its own yet
                    os.kill(self.pid, signal.SIGKILL)
        with self.changed:
            self.changed.wait_for(lambda: self.code is not None, _START_S)


class FunctionServer:
    """Starts processes that call `target`, from any thread. Its log is appended to `log`.

    `environment` is added to that of the server: the client, whose TLS context it creates once, follows it. Each
    process can write to `memory_limit_mb` MiB of memory of its own.
    """

    def __init__(
        self, target: str, log: Path, environment: Mapping[str, str] = {}, memory_limit_mb: int | None = None
    ) -> None:
        self._target, self._log, self._environment = target, log, dict(environment)
        self._memory_limit_mb = memory_limit_mb
        self._lock = threading.Lock()
        self._processes: dict[int, FunctionProcess] = {}
        """Those of the present server."""
        self._number = 0
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], transcript: str) -> FunctionProcess:
        """Start a process with `environment`, and its output appended to `transcript`. Raises OSError."""
        process = FunctionProcess()
        with self._lock:
            server = self._running()
            self._number += 1
            number = self._number
            self._processes[number] = process
            assert server.stdin is not None
            order = {"number": number, "environment": dict(environment), "transcript": transcript}
            line = json.dumps(order | {"memory_limit_mb": self._memory_limit_mb})
            server.stdin.write(line.encode() + b"\n")
            server.stdin.flush()
        with process.changed:
            started = process.changed.wait_for(lambda: process.pid or process.code is not None, _START_S)
        if not started:
            with self._lock:  # else it would play the episode later, beside the next attempt
                server.kill()
                server.wait()
            raise OSError(f"{self._target} was not loaded within {_START_S:g} s")
        if process.code is not None and not process.pid:
            raise OSError(f"{self._target} cannot be loaded: see {self._log}")
        return process

    def close(self) -> None:
        """End the server; its processes end with it."""
        with self._lock:
            if self._server is not None:
                self._server.kill()
                _close_input(self._server)
                self._server.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            if self._server is not None:
                _close_input(self._server)
            command = [sys.executable, "-P", "-m", "operators.agents.function_server", self._target]
            with self._log.open("ab") as log:
                self._server = subprocess.Popen(
                    die_with_parent_command(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self._environment},
                )
            self._processes = {}
            threading.Thread(target=self._read, args=(self._server, self._processes), daemon=True).start()
        return self._server

    def _read(self, server: subprocess.Popen[bytes], processes: dict[int, FunctionProcess]) -> None:
        assert server.stdout is not None
        for line in server.stdout:
            event = json.loads(line)
            process = processes[event["number"]]
            with process.changed:
                process.pid, process.code = event.get("pid", process.pid), event.get("code")
                process.changed.notify_all()
            if event.get("code") is not None:
                del processes[event["number"]]
        server.stdout.close()
        server.wait()
        with self._lock:
            lost = [processes.pop(number) for number in list(processes)]
        for process in lost:
            with process.changed:
                process.code = process.code if process.code is not None else 1
                process.changed.notify_all()


def _close_input(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    with suppress(OSError):  # what was not sent yet
        server.stdin.close()


def load_function(target: str) -> Callable[..., Any]:
    """The function `module:function`. Raises ValueError if there is none, or it does not take a client and a task, and
    what the import of its module raises."""
    module, _, name = target.rpartition(":")
    function: Callable[..., Any] = member_of(module, name, "function", callable)
    try:
        signature = inspect.signature(function)
    except ValueError:  # it is not written in Python
        return function
    try:
        signature.bind("client", "task")
    except TypeError as error:
        raise ValueError(
            f"{target} is called as {name}(client, task), but its definition is {name}{signature}: {error}"
        ) from None
    return function


def main(target: str) -> None:
    """Serve until standard input ends."""
    import openai

    try:
        function = load_function(target)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    events = os.dup(1)
    os.dup2(2, 1)
    client = openai.OpenAI(api_key="none", base_url="http://none", max_retries=MAX_RETRIES)
    with suppress(openai.OpenAIError, OSError):  # then each process does what would have been done here
        _answer_once(client)
    running: dict[int, int] = {}
    own_pid = os.getpid()
    buffer, open_input = b"", True
    while open_input:
        if select.select([0], [], [], _REAP_S if running else None)[0]:
            data = os.read(0, 65536)
            open_input = bool(data)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if not pid:
                    os.close(events)
                    _call(function, client, order, own_pid)
                running[pid] = order["number"]
                _write(events, {"number": order["number"], "pid": pid})
        while running and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            number = running.pop(ended.si_pid, None)  # None: a child that the user's module started
            with suppress(ProcessLookupError, PermissionError):
                if number is not None:
                    os.killpg(ended.si_pid, signal.SIGKILL)  # what it has started; not reaped yet, its id is its own
            _, status = os.waitpid(ended.si_pid, 0)
            if number is not None:
                _write(events, {"number": number, "code": os.waitstatus_to_exitcode(status)})


def _answer_once(client: Any) -> None:
    """Let `client` read one answer, of this process: it imports and builds its types at the first one, which takes more
    CPU time than a short episode. Processes forked later have them."""
    with TCPServer(("127.0.0.1", 0), _Answer) as server:  # an HTTPServer would ask for the address's name
        server.timeout = _WARM_S
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        here = client.with_options(base_url=url, timeout=_WARM_S, max_retries=0)
        here.chat.completions.create(model="", messages=[])
        answering.join()


class _Answer(BaseHTTPRequestHandler):
    """An empty answer."""

    def do_POST(self) -> None:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ""}}
        body = {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _call(function: Any, client: Any, order: Mapping[str, Any], server: int) -> None:
    """In a process forked by `server`: call the function, write its report, and exit."""
    code = 1
    try:
        die_with(server)
        os.setsid()
        if order["memory_limit_mb"] is not None:
            lower_limit(resource.RLIMIT_DATA, order["memory_limit_mb"] << 20)
        descriptor = os.open(order["transcript"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        environment = order["environment"]
        os.environ.update(environment)
        own = client.with_options(api_key=environment["OPENAI_API_KEY"], base_url=environment["OPENAI_BASE_URL"])
        task = json.loads(Path(environment["LAMINAR_TASK_FILE"]).read_bytes())
        report = report_of(function(own, task))
        Path(environment["LAMINAR_REPORT"]).write_text(json.dumps(report))
        code = 0
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def report_of(returned: Any) -> dict[str, Any]:
    """The report that a function's return value stands for. Raises TypeError for any other value."""
    if returned is None:
        return {}
    if isinstance(returned, bool | int | float):
        return {"reward": float(returned)}
    if isinstance(returned, str):
        return {"answer": returned}
    if isinstance(returned, dict) and returned.keys() <= REPORT_FIELDS:
        return returned
    wanted = "a reward, an answer, a dict with reward, rewards and answer, or None"
    raise TypeError(f"an agent must return {wanted}, not {str(returned)[:80]!r}")


def _write(descriptor: int, event: Mapping[str, Any]) -> None:
    os.write(descriptor, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
