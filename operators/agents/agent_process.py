"""One agent: its process, its attempts, its transcript, and the report of its result to the gateway."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import re
import socket
import stat
import subprocess
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.files import create_secret, read_secret
from infra.http_client import post_json
from infra.json_text import decode_json
from infra.machine import GATEWAY_URL
from infra.processes import die_with_parent_command, kill_session
from infra.transport.dialer import FailedAddresses
from operators.agents.config import AgentsConfig
from operators.agents.function_server import REPORT_FIELDS, FunctionProcess, FunctionServer
from operators.io.episode_keys import ADDRESS_FILE, ATTEMPT, EpisodeKeys

log = logging.getLogger(__name__)

MAX_REPORT_BYTES = 1_000_000
MAX_OUTPUT_BYTES = 16 * 2**20
"""What an attempt may print: the transcripts are beside the run's other files."""
MAX_TASK_BYTES = 100_000
"""A larger task is in the file alone: Linux starts no program with a variable of 131,072 bytes."""
TASK_FILE, REPORT_FILE = "task.json", "report.json"
"""In the folder of an attempt."""
ERROR_CHARACTERS = 500
AUTHORITY = "SSL_CERT_FILE"
"""The variable by which agents, in `agents.env`, trust the authority of the gateway's certificate."""
_TRACEBACK_BYTES = 16_384
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+).*$', re.M)
_POLL_S = 0.02
_RETRY_S = 0.5
_CONNECT_S = 5.0
_unreachable = FailedAddresses(time.monotonic)
"""The gateway, if it did not respond lately."""


Start = Callable[[], "FunctionProcess | CommandProcess"]
"""Starts the process of an agent. Raises OSError."""


class WrongKey(RuntimeError):
    """The gateway does not accept the keys of this process."""


@dataclass(frozen=True)
class AgentTask:
    """The episode that an agent plays, and its task for it."""

    episode: str
    task: Mapping[str, Any]


def play_episode(
    config: AgentsConfig,
    task: AgentTask,
    run: str,
    folder: Path,
    secret_file: Path,
    work: Path,
    stop: threading.Event,
    functions: FunctionServer | None = None,
    start: int = 1,
) -> None:
    """Run the agent of `task`, again after a failure, and report its result. Returns early once `stop` is set. Raises
    WrongKey, and OSError for a full disk.

    `functions` starts the processes if the agent is a function. `start` is that of this role's process: the gateway
    counts the equal requests of each attempt of each start, and answers the first ones from the log.
    """
    create_secret(secret_file)
    keys = EpisodeKeys(run, read_secret(secret_file))
    key, error = keys.key_of(task.episode), ""
    _await_gateway(folder, stop)
    with _transcript(folder / "agents" if config.transcripts else None, work, task.episode) as transcript:
        report = partial(_report, folder, key, transcript=transcript, stop=stop, authority=config.env.get(AUTHORITY))
        for attempt in range(config.retries + 1):
            if stop.is_set():
                return
            own_key = f"{key}{ATTEMPT}{start}.{attempt}"
            with attempt_folder(work, f"{task.episode}.{attempt}") as own:
                error = _run_attempt(config, task, own_key, folder, own, transcript, stop, functions)
                if not error:
                    try:
                        body = read_report(own / REPORT_FILE)
                    except ValueError as invalid:
                        error = str(invalid)
                        note(transcript, error)
            if not error:
                report(body)
                return
            log.warning("attempt %d of the agent of %s failed: %s", attempt + 1, task.episode, error)
        report({"error": error})


def _await_gateway(folder: Path, stop: threading.Event) -> None:
    """Wait until the gateway has started and this machine can connect to its address, or `stop` is set."""
    while not (GATEWAY_URL in os.environ or (folder / ADDRESS_FILE).exists()) and not stop.wait(_POLL_S):
        pass
    while not stop.is_set():
        try:
            url = urlsplit(base_url(folder))
            socket.create_connection((url.hostname or "", url.port or 443), _CONNECT_S).close()
            return
        except OSError as error:
            _warn_unreachable(base_url(folder), error)
        stop.wait(_RETRY_S)


def _warn_unreachable(url: str, error: Exception) -> None:
    """Log that the gateway at `url` does not respond, once while that lasts."""
    if _unreachable.add(url):
        setting = f"the variable {GATEWAY_URL}" if GATEWAY_URL in os.environ else "gateway.advertise"
        log.warning(
            "the gateway at %s does not respond to this machine: %s; if it runs, set %s to an address that "
            "this machine reaches",
            url,
            error,
            setting,
        )


@contextmanager
def _transcript(kept: Path | None, work: Path, episode: str) -> Iterator[Path]:
    """The transcript of `episode`: in the folder `kept`, else in `work` until the context ends."""
    file = (kept or work) / f"{episode}.log"
    file.parent.mkdir(exist_ok=True)
    try:
        yield file
    finally:
        if kept is None:
            file.unlink(missing_ok=True)


def _run_attempt(
    config: AgentsConfig,
    task: AgentTask,
    key: str,
    folder: Path,
    own: Path,
    transcript: Path,
    stop: threading.Event,
    functions: FunctionServer | None,
) -> str:
    """Run the agent once; returns why it failed, "" if it did not."""
    environment = {**config.env, **environment_of(base_url(folder), key, task.task, own)}
    start = (
        start_command(config.command, environment, transcript, config.memory_limit_mb)
        if functions is None
        else partial(functions.start, environment, str(transcript))
    )
    error = attempt(start, transcript, config.timeout_s, stop)
    limited = config.memory_limit_mb is not None and ("MemoryError" in error or error.startswith("exit status -"))
    return f"{error} (agents.memory_limit_mb = {config.memory_limit_mb})" if limited else error


@contextmanager
def attempt_folder(work: Path, name: str) -> Iterator[Path]:
    """A folder in `work` for the task and the report of an attempt, until the context ends."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=work, ignore_cleanup_errors=True) as made:
        yield Path(made)


def environment_of(url: str, key: str, task: Mapping[str, Any], own: Path) -> dict[str, str]:
    """The environment variables of an agent, whose task is written to its folder `own`. Raises OSError."""
    text = json.dumps(task, ensure_ascii=False)
    (own / TASK_FILE).write_text(text, "utf-8")
    variable = {"LAMINAR_TASK": text} if len(text.encode()) <= MAX_TASK_BYTES else {}
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "LAMINAR_TASK_FILE": str(own / TASK_FILE),
        "LAMINAR_REPORT": str(own / REPORT_FILE),
        **variable,
    }


def start_command(
    command: Sequence[str], environment: Mapping[str, str], transcript: Path, memory_limit_mb: int | None = None
) -> Start:
    """How the process of a command starts."""
    return partial(CommandProcess, die_with_parent_command(list(command), memory_limit_mb), environment, transcript)


def attempt(start: Start, transcript: Path, timeout_s: float, stop: threading.Event) -> str:
    """Run an agent once, for `timeout_s` seconds at most; returns why it failed, "" if it did not."""
    begin, code = _size_of(transcript), None
    try:
        process = start()
    except OSError as error:
        return f"it cannot be started: {error}"
    deadline = time.monotonic() + timeout_s
    try:
        while code is None:
            if time.monotonic() > deadline:
                return f"it ran for longer than agents.timeout_s, {timeout_s:g} s"
            if (code := process.poll()) is None and stop.wait(_POLL_S):
                return "it was stopped"
            if _size_of(transcript) - begin > MAX_OUTPUT_BYTES:
                return f"it has printed more than {MAX_OUTPUT_BYTES} bytes"
    finally:
        process.kill()
    return f"exit status {code}: {_tail(transcript, begin)}".rstrip(": ") if code else ""


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


class CommandProcess:
    """The process of one episode, of a command; it leads a session of its own. Raises OSError if it cannot start."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], transcript: Path) -> None:
        with transcript.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it and the processes in its group, and wait until it has ended."""
        kill_session(self._process)


def _tail(transcript: Path, start: int) -> str:
    """The last lines of what the agent wrote from byte `start` on; before them, the error of a Python traceback."""
    with suppress(OSError), transcript.open("rb") as file:
        file.seek(max(start, transcript.stat().st_size - _TRACEBACK_BYTES))
        text = file.read().decode(errors="replace").strip()
        return f"{_raised(text)}{text[-ERROR_CHARACTERS:]}"
    return ""


def _raised(text: str) -> str:
    """The line of the exception at the end of `text` and where it was raised, if `text` ends with a traceback."""
    frames = list(_FRAME.finditer(text))
    after = text[frames[-1].end() :].splitlines() if frames else []
    error = next((line for line in after if line and not line[0].isspace()), "")
    if not error:
        return ""
    own = [frame for frame in frames if "site-packages" not in frame["file"]] or frames
    return f"{error[:ERROR_CHARACTERS]} ({os.path.basename(own[-1]['file'])}:{own[-1]['line']})\n"


def read_report(file: Path) -> dict[str, Any]:
    """The agent's report; empty without one. Raises ValueError, also if it is not a plain file."""
    try:
        written = _read_plain_file(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"its report cannot be read: {error.strerror}") from error
    if len(written) > MAX_REPORT_BYTES:
        raise ValueError(f"its report has more than {MAX_REPORT_BYTES} bytes")
    try:
        report = decode_json(written)
    except ValueError as error:
        raise ValueError(f"its report is not valid JSON: {error}") from error
    if not isinstance(report, dict) or not report.keys() <= REPORT_FIELDS:
        raise ValueError(f"its report must have reward, rewards and answer only, not {str(report)[:80]}")
    return report


def _read_plain_file(file: Path) -> bytes:
    """One byte more than MAX_REPORT_BYTES of `file`, at most; a pipe or a device would block, or never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    with open(descriptor, "rb") as opened:
        return opened.read(MAX_REPORT_BYTES + 1)


def note(transcript: Path, text: str) -> None:
    """Append what Laminar has to say of an agent to its transcript."""
    with suppress(OSError), transcript.open("a", encoding="utf-8") as file:
        file.write(f"laminar: {text}\n")


def rejection(error: int, text: str) -> str:
    """Why the gateway rejected a report with status `error` and the body `text`."""
    try:
        return f"its report was rejected: {json.loads(text)['error']['message']}"
    except (ValueError, TypeError, KeyError):
        return f"its report was rejected with status {error}: {text}"


def _report(
    folder: Path, key: str, body: Mapping[str, Any], transcript: Path, stop: threading.Event, authority: str | None
) -> None:
    """Report the result of an episode to the gateway, until it is recorded or `stop` is set. Raises WrongKey.

    `authority`: a file with the authorities of the gateway's certificate, instead of the system's.
    """
    while not stop.is_set():
        try:
            with post_json(f"{base_url(folder)}/episode/end", key, body, 60, authority) as response:
                response.read(MAX_REPORT_BYTES)
            return
        except urllib.error.HTTPError as error:
            text = error.read(ERROR_CHARACTERS).decode(errors="replace")
            if error.code == 409:
                return  # it has ended
            if error.code in (401, 403):
                reason = "is gateway.secret_file the same file for the roles agents and gateway?"
                raise WrongKey(f"the gateway rejects the keys that this role makes: {reason} ({text})") from error
            if error.code < 500 and error.code not in (408, 429) and "error" not in body:
                body = {"error": rejection(error.code, text)}
                note(transcript, body["error"])
            log.warning("the gateway rejected a report with status %d: %s", error.code, text)
        except (OSError, http.client.HTTPException) as error:
            _warn_unreachable(base_url(folder), error)
        stop.wait(_RETRY_S)


def base_url(folder: Path) -> str:
    """The URL of the run's gateway. Raises OSError if it has not started."""
    return os.environ.get(GATEWAY_URL) or str(json.loads((folder / ADDRESS_FILE).read_text())["url"])
