"""A process that a server of an agent's function forks for an episode."""

from __future__ import annotations

import json
import os
from http.server import HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from operators.agents import function_server
from operators.agents.function_server import FunctionServer, _Answer, _call

AGENT = """
import sys


def solve(client, task):
    before = set(sys.modules)
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task["text"]}])
    return {"answer": f"{sorted(set(sys.modules) - before)} {answer.choices[0].finish_reason}"}
"""


WITH_CHILD = """
import os
import subprocess

child = subprocess.Popen(["true"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def solve(client, task):
    return 1.0
"""
SLOW = """
import time

time.sleep(60)
"""


def test_process_of_a_server_that_was_killed_first_does_nothing(tmp_path: Path) -> None:
    """The kernel kills a process when its parent ends, but not if the parent has ended before that was asked for."""
    order = {"number": 0, "memory_limit_mb": None, "transcript": str(tmp_path / "transcript")}
    pid = os.fork()
    if not pid:
        _call(None, None, order, server=-1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not (tmp_path / "transcript").exists()


def test_processes_import_nothing_at_their_first_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client imports and builds what it needs once, before processes are forked."""
    pytest.importorskip("openai")
    (tmp_path / "slow_start_agent.py").write_text(AGENT)
    (tmp_path / "task").write_text(json.dumps({"text": "hello"}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    functions = FunctionServer("slow_start_agent:solve", tmp_path / "log")
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        environment = {
            "OPENAI_API_KEY": "key",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
            "LAMINAR_TASK_FILE": str(tmp_path / "task"),
            "LAMINAR_REPORT": str(tmp_path / "report"),
        }
        process = functions.start(environment, str(tmp_path / "transcript"))
        try:
            with process.changed:
                assert process.changed.wait_for(lambda: process.code is not None, 60)
        finally:
            functions.close()
    assert process.code == 0, (tmp_path / "transcript").read_text()
    assert json.loads((tmp_path / "report").read_text()) == {"answer": "[] stop"}


def test_child_of_the_module_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    (tmp_path / "agent_with_child.py").write_text(WITH_CHILD)
    (tmp_path / "task").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    named = {"LAMINAR_TASK_FILE": str(tmp_path / "task"), "LAMINAR_REPORT": str(tmp_path / "report")}
    functions = FunctionServer("agent_with_child:solve", tmp_path / "log")
    try:
        process = functions.start(
            {"OPENAI_API_KEY": "key", "OPENAI_BASE_URL": "http://none", **named}, str(tmp_path / "transcript")
        )
        with process.changed:
            assert process.changed.wait_for(lambda: process.code is not None, 60)
        assert process.code == 0, (tmp_path / "log").read_text()
    finally:
        functions.close()


def test_server_that_does_not_start_in_time_plays_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_agent.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(function_server, "_START_S", 0.5)
    functions = FunctionServer("slow_agent:solve", tmp_path / "log")
    with pytest.raises(OSError, match=r"slow_agent:solve was not loaded within 0\.5 s"):
        functions.start({}, str(tmp_path / "transcript"))
    assert functions._server is not None
    assert functions._server.wait(10) < 0
    functions.close()
