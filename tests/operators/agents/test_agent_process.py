"""Agents as processes: their environment, attempts, time limit and reports, with a gateway of a few lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from record_factories import prompt, shard
from report_server import Reports
from waiting import until

from infra.certificates import write_gateway_files, write_relay_files
from infra.files import read_secret, write_atomically
from operators.agents import run_agents
from operators.agents.agent_process import AgentTask, WrongKey, base_url, environment_of, play_episode
from operators.agents.config import AgentsConfig
from operators.agents.function_server import FunctionServer, report_of
from operators.agents.run_agents import RunAgents
from operators.gateway.config import GatewayConfig
from operators.gateway.serve_agents import server_context
from operators.io.elements import Polled, ReceivedRecord, Restored
from operators.io.episode_keys import ADDRESS_FILE, EpisodeKeys
from schemas.records import Assignment

REPORTS = "import json, os; report = lambda **of: open(os.environ['LAMINAR_REPORT'], 'w').write(json.dumps(of)); "


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    made = Reports(tmp_path)
    yield made
    made.close()


TASK = {"text": "2 + 2", "reference": {"answer": "4"}}


def play(folder: Path, program: str, task: Mapping[str, Any] = TASK, **settings: Any) -> None:
    config = AgentsConfig(command=(sys.executable, "-c", REPORTS + program), **settings)
    play_episode(config, AgentTask("p0.3", task), "run", folder, folder / "secret", folder, threading.Event())


def test_agent_gets_task_and_key_and_reports(tmp_path: Path, reports: Reports) -> None:
    program = (
        "task = json.loads(os.environ['LAMINAR_TASK']); print('working'); "
        "report(reward=0.5, answer=task['text'] + os.environ['OPENAI_API_KEY'] + os.environ['MORE'])"
    )
    play(tmp_path, program, env={"MORE": "!"})
    key = EpisodeKeys("run", read_secret(tmp_path / "secret")).key_of("p0.3")
    assert reports.received == [{"reward": 0.5, "answer": f"2 + 2{key}~1.0!"}]
    assert reports.keys == [f"Bearer {key}"]
    assert (tmp_path / "agents" / "p0.3.log").read_text() == "working\n"


@pytest.mark.parametrize("length", [10, 200_000])
def test_task_is_in_a_file_and_a_small_one_in_a_variable(length: int, tmp_path: Path, reports: Reports) -> None:
    """Linux starts no program with a variable of 131,072 bytes."""
    program = (
        "task = json.load(open(os.environ['LAMINAR_TASK_FILE'])); "
        "report(reward=len(task['text']), answer=str('LAMINAR_TASK' in os.environ))"
    )
    task = {"text": "é" * length}
    play(tmp_path, program, task=task, retries=0)
    (tmp_path / "my_agent.py").write_text("def solve(client, task):\n    return len(task['text'])\n")
    config = AgentsConfig(function=f"{tmp_path}/my_agent.py:solve", retries=0)
    functions = FunctionServer(config.function, tmp_path / "functions.log")
    secret, work = tmp_path / "secret", tmp_path / "work"
    work.mkdir()
    play_episode(config, AgentTask("p0.4", task), "run", tmp_path, secret, work, threading.Event(), functions)
    functions.close()
    assert reports.received == [{"reward": length, "answer": str(length == 10)}, {"reward": length}]
    assert not list(work.iterdir())


def test_failed_attempt_is_repeated_and_then_reported(tmp_path: Path, reports: Reports) -> None:
    play(tmp_path, "raise SystemExit('no tool')", retries=2)
    assert reports.received == [{"error": "exit status 1: no tool"}]
    assert (tmp_path / "agents" / "p0.3.log").read_text() == "no tool\n" * 3


def test_error_of_a_traceback_begins_with_its_exception(tmp_path: Path, reports: Reports) -> None:
    play(tmp_path, "{}['answr']", retries=0)
    (error,) = (report["error"] for report in reports.received)
    first, trace, *_ = error.splitlines()
    assert first == "exit status 1: KeyError: 'answr' (<string>:1)"
    assert trace == "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("report(points=1)", "its report must have reward, rewards and answer only, not {'points': 1}"),
        ("open(os.environ['LAMINAR_REPORT'], 'w').write('{')", "its report is not valid JSON"),
        ("open(os.environ['LAMINAR_REPORT'], 'w').write('[' * 100000)", "nested more than 64 deep"),
        ("os.mkdir(os.environ['LAMINAR_REPORT'])", "its report cannot be read: it is not a plain file"),
        ("os.mkfifo(os.environ['LAMINAR_REPORT'])", "its report cannot be read: it is not a plain file"),
        ("os.symlink('/dev/zero', os.environ['LAMINAR_REPORT'])", "its report cannot be read: it is not a plain file"),
        ("import time; time.sleep(60)", "it ran for longer than agents.timeout_s, 1 s"),
    ],
)
def test_invalid_report_or_time_out_fails_the_episode(
    program: str, error: str, tmp_path: Path, reports: Reports
) -> None:
    play(tmp_path, program, retries=0, timeout_s=1 if "sleep" in program else 600)
    assert error in reports.received[0]["error"]


ALLOCATES = """
kept = bytearray(300 * 2**20)
"""


@pytest.mark.parametrize("function", [False, True])
def test_memory_of_an_agent_is_limited(function: bool, tmp_path: Path, reports: Reports) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(f"def solve(client, task):\n{textwrap.indent(ALLOCATES, '    ')}")
    own = {"function": f"{file}:solve"} if function else {"command": (sys.executable, "-c", ALLOCATES)}
    for limit in (256, None):
        config = AgentsConfig(**own, retries=0, memory_limit_mb=limit)
        server = FunctionServer(config.function, tmp_path / "functions.log", memory_limit_mb=limit)
        functions = server if function else None
        secret = tmp_path / "secret"
        play_episode(config, AgentTask("p0.3", TASK), "run", tmp_path, secret, tmp_path, threading.Event(), functions)
        if functions is not None:
            functions.close()
    failed, passed = reports.received
    assert failed["error"].startswith("exit status 1: MemoryError")
    assert failed["error"].endswith("(agents.memory_limit_mb = 256)")
    assert passed == {}


@pytest.mark.parametrize("end", ["time.sleep(600)", "raise SystemExit"])
def test_agent_that_prints_too_much_fails(
    end: str, tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operators.agents.agent_process.MAX_OUTPUT_BYTES", 1000)
    play(tmp_path, f"import time; print('x' * 2000, flush=True); {end}", retries=0)
    assert reports.received == [{"error": "it has printed more than 1000 bytes"}]


def test_processes_that_an_agent_started_end_with_it(tmp_path: Path, reports: Reports) -> None:
    started = "subprocess.Popen(['sleep', '600']).pid"
    play(tmp_path, f"import subprocess; report(reward={started})", retries=0)
    (tmp_path / "my_agent.py").write_text(f"import subprocess\ndef solve(client, task):\n    return float({started})\n")
    config = AgentsConfig(function=f"{tmp_path}/my_agent.py:solve", retries=0)
    functions, stop = FunctionServer(config.function, tmp_path / "functions.log"), threading.Event()
    play_episode(config, AgentTask("p0.4", TASK), "run", tmp_path, tmp_path / "secret", tmp_path, stop, functions)
    functions.close()
    pids = [int(report["reward"]) for report in reports.received]
    assert len(pids) == 2
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)


def test_rejected_report_is_in_the_transcript_and_ends_episode(tmp_path: Path, reports: Reports) -> None:
    play(tmp_path, "print('done'); report(rewards={'x': 1.0})", retries=2)
    assert reports.received == [{"error": "its report was rejected: rewards: no such id"}]
    text = "done\nlaminar: its report was rejected: rewards: no such id\n"
    assert (tmp_path / "agents" / "p0.3.log").read_text() == text


def test_invalid_report_is_in_the_transcript(tmp_path: Path, reports: Reports) -> None:
    play(tmp_path, "report(points=1)", retries=0)
    assert (tmp_path / "agents" / "p0.3.log").read_text().startswith("laminar: its report must have reward, rewards")


@pytest.mark.parametrize("status", [408, 503])
def test_report_is_repeated_until_accepted(tmp_path: Path, reports: Reports, monkeypatch: Any, status: int) -> None:
    monkeypatch.setattr("operators.agents.agent_process._RETRY_S", 0.01)
    reports.refused, reports.refusal = 3, status
    play(tmp_path, "report(reward=1)")
    assert reports.received == [{"reward": 1}]


def test_agent_starts_once_the_gateway_can_be_reached(
    tmp_path: Path, reports: Reports, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operators.agents.agent_process._RETRY_S", 0.01)
    address, started = (tmp_path / ADDRESS_FILE).read_text(), tmp_path / "started"
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"url": "http://127.0.0.1:1/v1"}))
    thread = threading.Thread(target=play, args=(tmp_path, f"open({str(started)!r}, 'w').close(); report(reward=1)"))
    thread.start()
    until(lambda: caplog.messages != [])
    (line,) = caplog.messages
    assert "http://127.0.0.1:1/v1 does not respond to this machine" in line
    assert "set gateway.advertise" in line
    assert not started.exists()
    write_atomically(tmp_path / ADDRESS_FILE, address)
    thread.join(60)
    assert reports.received == [{"reward": 1}]


def test_key_that_the_gateway_rejects_ends_the_role(tmp_path: Path, reports: Reports) -> None:
    """It would reject the keys of all episodes; before, each report was repeated twice a second for ever."""
    reports.refused, reports.refusal = 1, 401
    step = RunAgents(AgentsConfig(command=("true",)), shard("agents"), tmp_path, tmp_path / "secret", 1, 0)
    fold = step.restore(Restored("agents", 1, (), {}, {}))
    assignment = Assignment(prompt(0, 1, environment="agent"), 0, 1, 1, 0, 1, None, None, 0)
    polled = Polled("agents", 1, (ReceivedRecord("inbox", 0, 0, assignment),), (), {}, caught_up=True)

    def fold_on() -> None:
        while True:
            fold.fold(polled)
            time.sleep(0.01)

    with pytest.raises(WrongKey, match=r"is gateway.secret_file the same file for the roles agents and gateway\?"):
        fold_on()
    fold.close()


def test_no_more_agents_run_at_once_than_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed = [], threading.Event()
    monkeypatch.setattr(run_agents, "play_episode", lambda *of, **options: (started.append(of), proceed.wait(60)))
    step = RunAgents(AgentsConfig(command=("true",), concurrency=2), shard("agents"), tmp_path, tmp_path / "s", 1, 0)
    fold = step.restore(Restored("agents", 1, (), {}, {}))
    assigned = [Assignment(prompt(0, 4, environment="agent"), at, 1, 1, 0, 1, None, None, 0) for at in range(4)]
    records = tuple(ReceivedRecord("inbox", 0, at, each) for at, each in enumerate(assigned))
    fold.fold(Polled("agents", 1, records, (), {}, caught_up=True))
    while len(started) < 2:
        time.sleep(0.001)
    assert (len(fold._threads), len(fold._waiting)) == (2, 2)
    proceed.set()
    while len(started) < 4:
        time.sleep(0.001)
    fold.close()


@pytest.mark.parametrize(
    ("returned", "report"),
    [
        (None, {}),
        (True, {"reward": 1.0}),
        (2, {"reward": 2.0}),
        ("4", {"answer": "4"}),
        ({"answer": ""}, {"answer": ""}),
    ],
)
def test_return_value_of_a_function_is_its_report(returned: Any, report: dict[str, Any]) -> None:
    assert report_of(returned) == report


def test_other_return_values_are_errors() -> None:
    with pytest.raises(TypeError, match="an agent must return a reward, an answer"):
        report_of([1])
    with pytest.raises(TypeError, match="an agent must return"):
        report_of({"points": 1})


def test_transcript_that_is_not_kept_has_the_error_in_the_log(
    tmp_path: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    config = AgentsConfig(command=("sh", "-c", "echo no idea >&2; exit 3"), retries=0, transcripts=False)
    task = AgentTask("p0.1", {})
    play_episode(config, task, "run", tmp_path, tmp_path / "secret", tmp_path, threading.Event())
    assert reports.received == [{"error": "exit status 3: no idea"}]
    assert "exit status 3: no idea" in caplog.text
    assert not list(tmp_path.rglob("p0.1*"))


FUNCTION = """
import os, sys, time
calls = []

def solve(client, task):
    calls.append(task)
    print("call", len(calls), client.api_key[:8], client.base_url)
    if task["text"] == "fail":
        raise RuntimeError("no idea")
    while task["text"] == "wait":
        time.sleep(0.01)
    return {"reward": 1.0, "answer": task["text"]}
"""


def test_functions_run_in_forked_processes_of_one_server(tmp_path: Path, reports: Reports) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTION)
    config = AgentsConfig(function=f"{tmp_path}/my_agent.py:solve", retries=0, timeout_s=30)
    functions = FunctionServer(config.function, tmp_path / "functions.log")
    waiting = threading.Event()

    def run(number: int, text: str, stop: threading.Event) -> None:
        task = AgentTask(f"p0.{number}", {"text": text})
        play_episode(config, task, "run", tmp_path, tmp_path / "secret", tmp_path, stop, functions)

    try:
        slow = threading.Thread(target=run, args=(0, "wait", waiting))
        slow.start()
        run(1, "2 + 2", threading.Event())
        run(2, "fail", threading.Event())
        waiting.set()
        slow.join()
    finally:
        functions.close()
    assert reports.received[0] == {"reward": 1.0, "answer": "2 + 2"}
    assert "RuntimeError: no idea" in reports.received[1]["error"]
    assert (tmp_path / "agents" / "p0.1.log").read_text().startswith("call 1 lm-p0.1- http://127.0.0.1")


def test_function_server_that_dies_ends_only_its_own_processes(
    tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader may notice the end only after another thread has started the next server."""
    (tmp_path / "my_agent.py").write_text(FUNCTION)
    functions = FunctionServer(f"{tmp_path}/my_agent.py:solve", tmp_path / "functions.log")
    environment = environment_of(base_url(tmp_path), "key", {"text": "wait"}, tmp_path)
    late, read = threading.Event(), FunctionServer._read

    def read_late(self: FunctionServer, server: subprocess.Popen[bytes], *of: Any) -> None:
        if late.is_set():
            read(self, server, *of)
        else:
            first.append(partial(read, self, server, *of))

    def start_first() -> None:
        with suppress(OSError):
            functions.start(environment, str(tmp_path / "one.log"))

    first: list[Callable[[], None]] = []
    monkeypatch.setattr(FunctionServer, "_read", read_late)
    starting = threading.Thread(target=start_first)
    starting.start()
    while not first or functions._server is None:
        time.sleep(0.01)
    late.set()
    functions._server.kill()
    functions._server.wait()
    second = functions.start(environment, str(tmp_path / "two.log"))
    first[0]()
    starting.join()
    assert second.poll() is None
    second.kill()
    assert second.poll() == -signal.SIGKILL
    functions.close()


def test_functions_and_reports_trust_the_authority_of_agents_env(tmp_path: Path, reports: Reports) -> None:
    write_relay_files(tmp_path)
    secret, certificate = map(str, write_gateway_files(tmp_path, ["127.0.0.1"]))
    context = server_context(GatewayConfig(secret_file=secret, certificate_file=certificate, key_file=certificate))
    assert context is not None
    reports.server.socket = context.wrap_socket(reports.server.socket, server_side=True)
    url = f"https://127.0.0.1:{reports.server.server_address[1]}/v1"
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"url": url}))
    program = 'def solve(client, task):\n    client.post("/turn", cast_to=object, body={"turn": 1})\n    return 1.0\n'
    (tmp_path / "my_agent.py").write_text(program)
    env = {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    config = AgentsConfig(function=f"{tmp_path}/my_agent.py:solve", retries=0, timeout_s=60, env=env)
    functions, task = FunctionServer(config.function, tmp_path / "functions.log", config.env), AgentTask("p0.1", {})
    try:
        play_episode(config, task, "run", tmp_path, tmp_path / "secret", tmp_path, threading.Event(), functions)
    finally:
        functions.close()
    assert reports.received == [{"turn": 1}, {"reward": 1.0}]


def test_function_that_cannot_be_loaded_fails_its_episodes(tmp_path: Path, reports: Reports) -> None:
    (tmp_path / "my_agent.py").write_text("import nothing_of_that_name")
    config = AgentsConfig(function=f"{tmp_path}/my_agent.py:solve", retries=0)
    functions = FunctionServer(config.function, tmp_path / "functions.log")
    task = AgentTask("p0.1", {})
    play_episode(config, task, "run", tmp_path, tmp_path / "secret", tmp_path, threading.Event(), functions)
    functions.close()
    assert "cannot be loaded: see" in reports.received[0]["error"]
    assert "nothing_of_that_name" in (tmp_path / "functions.log").read_text()
