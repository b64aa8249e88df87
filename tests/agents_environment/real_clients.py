"""Real clients and harnesses against a live run: openai, litellm, pydantic-ai and inspect-ai (`make agents-test`).

This environment has no Laminar: a client knows an address and a key. What the model says is drawn, so the tests compare
what a client got with what is recorded: a retry gets the recorded response, and the episode's state has its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inspect_ai
import litellm
import openai
import pytest
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, PEOPLE, WORKER = (os.environ.get(name, "") for name in ("URL", "PEOPLE_KEY", "WORKER_KEY"))
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
ASK: list[Any] = [{"role": "user", "content": "12+34="}]
RETRY = {"x-stainless-retry-count": "1"}
"""A request with it gets the recorded response of the last equal one."""
PYDANTIC_AGENT = Path(__file__).parents[2] / "examples" / "agents" / "pydantic_agent.py"
pytestmark = pytest.mark.skipif(not URL, reason="run by `make agents-test`")


def post(path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """The response to `body`; empty for status 204."""
    request = urllib.request.Request(
        f"{URL}/{path}",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        data = response.read()
    return dict(json.loads(data)) if data else {}


def state_of(key: str) -> dict[str, Any]:
    """The episode's own state."""
    request = urllib.request.Request(f"{URL}/episode", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


@pytest.fixture
def claimed() -> Iterator[dict[str, Any]]:
    """An episode, which ends with the test."""
    found: dict[str, Any] = {}
    for _ in range(20):
        found = post("episodes/claim", WORKER, {"wait_s": 30})
        if found:
            break
    yield found
    assert post("episode/end", found["key"], {"reward": 0.5})["finished"]


@pytest.fixture
def key(claimed: dict[str, Any]) -> str:
    """The key of an episode, which ends with the test."""
    return str(claimed["key"])


def recorded(key: str, **options: Any) -> Any:
    """The recorded completion of the last request with ASK and `options`."""
    client = openai.OpenAI(base_url=URL, api_key=key)
    return client.chat.completions.create(model="laminar", messages=ASK, **options, extra_headers=RETRY)


def test_openai_takes_turns_of_one_conversation(key: str) -> None:
    client = openai.OpenAI(base_url=URL, api_key=key)
    messages, before = list(ASK), 0
    for _ in range(3):
        completion = client.chat.completions.create(model="laminar", messages=messages, max_tokens=8)
        messages += [completion.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "5+6="}]
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == before
        before = completion.usage.total_tokens
    state = state_of(key)
    assert (state["turns"], state["segments"], state["tokens"]) == (3, 1, before)


def test_openai_async_requests_are_all_answered(key: str) -> None:
    async def main() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=URL, api_key=key)
        asked = [client.chat.completions.create(model="laminar", messages=ASK, max_tokens=4) for _ in range(3)]
        return await asyncio.gather(*asked)

    completions = asyncio.run(main())
    assert all(each.choices[0].finish_reason in ("stop", "length") for each in completions)
    assert len({each.id for each in completions}) == 3
    state = state_of(key)
    drawn = sum(each.usage.completion_tokens for each in completions)
    assert (state["turns"], state["tokens"]) == (3, completions[0].usage.prompt_tokens + drawn)


def test_openai_streams_what_it_returns(key: str) -> None:
    client = openai.OpenAI(base_url=URL, api_key=key)
    stream = client.chat.completions.create(
        model="laminar", messages=ASK, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    whole = recorded(key, max_tokens=16)
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert state_of(key)["turns"] == 1


def test_openai_sends_tools_and_their_results(key: str) -> None:
    client = openai.OpenAI(base_url=URL, api_key=key)
    client.chat.completions.create(model="laminar", messages=ASK, tools=TOOLS, max_tokens=8)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 34}'}}
    said: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "46"})
    second = client.chat.completions.create(model="laminar", messages=said, tools=TOOLS, max_tokens=8)
    assert second.usage is not None
    response = client.responses.create(model="laminar", input="1+2=", max_output_tokens=8)
    again = client.responses.create(model="laminar", input="1+2=", max_output_tokens=8, extra_headers=RETRY)
    assert (response.output_text, response.id) == (again.output_text, again.id)
    state = state_of(key)
    assert (state["turns"], state["segments"]) == (3, 3), "the model did not say the call: its result begins a branch"


def test_litellm_completes_and_streams(key: str) -> None:
    common = {"model": "openai/laminar", "api_base": URL, "api_key": key, "messages": ASK, "max_tokens": 8}
    completion = litellm.completion(**common)
    whole = recorded(key, max_tokens=8)
    assert completion.choices[0].message.content == whole.choices[0].message.content
    assert completion.usage.total_tokens == whole.usage.total_tokens
    chunks = list(litellm.completion(**common, stream=True))
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == recorded(key, max_tokens=8).choices[0].message.content
    assert state_of(key)["turns"] == 2


def test_pydantic_ai_runs_an_agent_with_a_tool(key: str) -> None:
    model = OpenAIChatModel("laminar", provider=OpenAIProvider(base_url=URL, api_key=key))
    agent = Agent(model, instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    result = agent.run_sync("12+34=", model_settings={"max_tokens": 8})
    assert isinstance(result.output, str)
    assert state_of(key)["turns"] == result.usage.requests


def test_pydantic_agent_of_the_examples_reports(claimed: dict[str, Any], tmp_path: Path) -> None:
    task, report = tmp_path / "task.json", tmp_path / "report.json"
    task.write_text(json.dumps(claimed["task"]))
    variables = {"OPENAI_BASE_URL": URL, "OPENAI_API_KEY": claimed["key"], "LAMINAR_TASK_FILE": str(task)}
    environment = {**os.environ, **variables, "LAMINAR_REPORT": str(report)}
    subprocess.run([sys.executable, str(PYDANTIC_AGENT)], env=environment, check=True)
    found = json.loads(report.read_text())
    right = found["answer"].rpartition("#")[2].strip() == str(claimed["task"]["reference"]["answer"])
    assert found["reward"] == float(right)
    assert state_of(claimed["key"])["turns"] >= 1


def test_inspect_ai_evaluates_a_version_while_the_run_trains() -> None:
    with urllib.request.urlopen(
        urllib.request.Request(f"{URL}/models", headers={"authorization": f"Bearer {PEOPLE}"}), timeout=300
    ) as response:
        names = [each["id"] for each in json.load(response)["data"]]
    assert "laminar:latest" in names
    version = names[-1]  # one that does not change
    task = inspect_ai.Task(
        dataset=[Sample(input=f"{a}+{a + 1}=", target=str(2 * a + 1)) for a in range(10, 14)], scorer=includes()
    )
    model = get_model(f"openai/{version}", base_url=URL, api_key=PEOPLE, responses_api=False)
    logs = os.environ.get("INSPECT_LOGS", "/tmp")
    (log,) = inspect_ai.eval(task, model=model, max_tokens=32, temperature=0.0, display="none", log_dir=logs)
    assert log.status == "success"
    assert log.results is not None
    assert log.results.scores[0].scored_samples == 4
    client = openai.OpenAI(base_url=URL, api_key=PEOPLE)
    for sample in log.samples or ():
        messages: list[Any] = [{"role": "user", "content": sample.input}]
        alone = client.chat.completions.create(model=version, messages=messages, max_tokens=32, temperature=0.0)
        assert sample.output.completion == alone.choices[0].message.content


def test_an_unknown_key_is_rejected() -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=URL, api_key="sk-unknown", max_retries=0).models.list()
