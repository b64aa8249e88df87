"""Real clients and harnesses against a live run: openai, litellm, pydantic-ai and inspect-ai (`make agents-test`).

This environment has no Laminar: a client knows an address and a key. What the clients say is what a small model says,
so the tests check that requests are answered, recorded and ended, not what the answers are.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
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
def key() -> Iterator[str]:
    """The key of an episode, which ends with the test."""
    claimed: dict[str, Any] = {}
    for _ in range(20):
        claimed = post("episodes/claim", WORKER, {"wait_s": 30})
        if claimed:
            break
    yield claimed["key"]
    assert post("episode/end", claimed["key"], {"reward": 0.5})["finished"]


def test_openai_takes_turns_of_one_conversation(key: str) -> None:
    client = openai.OpenAI(base_url=URL, api_key=key)
    messages = list(ASK)
    for _ in range(3):
        completion = client.chat.completions.create(model="laminar", messages=messages, max_tokens=8)
        messages += [completion.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "5+6="}]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens
    state = state_of(key)
    assert (state["turns"], state["segments"]) == (3, 1)


def test_openai_async_requests_are_all_answered(key: str) -> None:
    async def main() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=URL, api_key=key)
        asked = [client.chat.completions.create(model="laminar", messages=ASK, max_tokens=4) for _ in range(3)]
        return await asyncio.gather(*asked)

    assert all(each.choices[0].finish_reason in ("stop", "length") for each in asyncio.run(main()))
    assert state_of(key)["turns"] == 3


def test_openai_streams_what_it_returns(key: str) -> None:
    client = openai.OpenAI(base_url=URL, api_key=key)
    stream = client.chat.completions.create(
        model="laminar", messages=ASK, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[0].choices[0].delta.role == "assistant"


def test_openai_sends_tools_and_their_results(key: str) -> None:
    client = openai.OpenAI(base_url=URL, api_key=key)
    first = client.chat.completions.create(model="laminar", messages=ASK, tools=TOOLS, max_tokens=8)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 34}'}}
    said: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "46"})
    second = client.chat.completions.create(model="laminar", messages=said, tools=TOOLS, max_tokens=8)
    assert first.choices
    assert second.choices
    response = client.responses.create(model="laminar", input="1+2=", max_output_tokens=8)
    assert response.status in ("completed", "incomplete")


def test_litellm_completes_and_streams(key: str) -> None:
    common = {"model": "openai/laminar", "api_base": URL, "api_key": key, "messages": ASK, "max_tokens": 8}
    assert litellm.completion(**common).choices[0].finish_reason in ("stop", "length")
    chunks = list(litellm.completion(**common, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_pydantic_ai_runs_an_agent_with_a_tool(key: str) -> None:
    model = OpenAIChatModel("laminar", provider=OpenAIProvider(base_url=URL, api_key=key))
    agent = Agent(model, instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    result = agent.run_sync("12+34=", model_settings={"max_tokens": 8})
    assert isinstance(result.output, str)
    assert state_of(key)["turns"] >= 1


def test_inspect_ai_evaluates_a_version_while_the_run_trains() -> None:
    with urllib.request.urlopen(
        urllib.request.Request(f"{URL}/models", headers={"authorization": f"Bearer {PEOPLE}"}), timeout=300
    ) as response:
        names = [each["id"] for each in json.load(response)["data"]]
    assert "laminar:latest" in names
    task = inspect_ai.Task(
        dataset=[Sample(input=f"{a}+{a + 1}=", target=str(2 * a + 1)) for a in range(10, 14)], scorer=includes()
    )
    model = get_model("openai/laminar:latest", base_url=URL, api_key=PEOPLE, responses_api=False)
    logs = os.environ.get("INSPECT_LOGS", "/tmp")
    (log,) = inspect_ai.eval(task, model=model, max_tokens=32, temperature=0.0, display="none", log_dir=logs)
    assert log.status == "success"
    assert log.results is not None
    assert log.results.scores[0].scored_samples == 4


def test_an_unknown_key_is_rejected() -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=URL, api_key="sk-unknown", max_retries=0).models.list()
