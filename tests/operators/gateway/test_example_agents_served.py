"""Agents of the examples with the client that they have in a run, against a gateway over a socket."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_harness import NAME
from test_http_server import LONG_S, Served

from schemas.records import TokenRange, TurnRequest

EXAMPLES = Path(__file__).parents[3] / "examples"
REPAIRED = "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0\n"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_repair_agent_extends_one_conversation_by_its_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gateway_harness.CONTEXT", 8192)
    solve = runpy.run_path(str(EXAMPLES / "agents" / "repair_agent.py"))["solve"]
    row = json.loads((EXAMPLES / "data" / "repositories.jsonl").read_text().splitlines()[0])
    written = call("write_file", path="stats.py", text=REPAIRED)
    texts = (call("read_file", path="stats.py") + call("run_tests"), f"I see.{written}", call("run_tests"), "DONE")
    served = Served(tmp_path, LONG_S, *(f"{each}$" for each in texts))
    served.run.budget = 8192
    with served:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{served.port}/v1", api_key=served.run.keys.key_of(NAME), max_retries=0
        )
        report = solve(client, {"text": row["question"], "reference": row})
        assert report == {"answer": "all tests passed\n", "reward": 1.0}
        turns = [order for order in served.run.orders if isinstance(order, TurnRequest)]
        assert [each.context for each in turns[1:]] == [(TokenRange(0, each.start),) for each in turns[1:]]
        read = served.run.recorded(turns[-1])
        results = ["return sum(numbers) / len(numbers)", "ZeroDivisionError", "T:written", "T:all tests passed"]
        places = [read.find(each) for each in results]
        assert -1 not in places
        assert places == sorted(places)
