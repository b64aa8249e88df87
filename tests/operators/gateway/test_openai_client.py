"""The client of the package openai with the gateway: responses, streams, tools and errors, as its users see them."""

from __future__ import annotations

import httpx2
import openai
import pytest
from gateway_harness import NAME, ScriptedRun, play

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def client_of(run: ScriptedRun, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    key = run.keys.key_of(NAME)
    return openai.AsyncOpenAI(base_url=str(http.base_url), api_key=key, http_client=http, max_retries=0)


def test_client_plays_a_conversation_with_tools_and_streams() -> None:
    async def scenario(run: ScriptedRun, http: httpx2.AsyncClient) -> None:
        client = client_of(run, http)
        messages: list = [{"role": "user", "content": "hello"}]
        first = await client.chat.completions.create(model="laminar", messages=messages, tools=TOOLS, logprobs=True)
        message = first.choices[0].message
        assert message.tool_calls
        assert message.tool_calls[0].function.name == "add"
        assert len(first.choices[0].logprobs.content) == first.usage.completion_tokens
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
        stream = await client.chat.completions.create(model="laminar", messages=messages, tools=TOOLS, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "two"
        assert len(run.orders[1].context) == 1
        assert [model.id async for model in client.models.list()] == ["laminar"]
        completion = await client.completions.create(model="laminar", prompt="once", stop="!")
        assert completion.choices[0].text == "more"

    play(ScriptedRun(f"{CALL}$", "two$", "more!"), scenario)


def test_completions_have_logprobs_in_their_own_shape() -> None:
    async def scenario(run: ScriptedRun, http: httpx2.AsyncClient) -> None:
        create = client_of(run, http).completions.create
        scored = (await create(model="laminar", prompt="once", logprobs=0, top_p=0, stop="bc")).choices[0]
        found = scored.logprobs
        assert (scored.text, found.tokens, found.text_offset) == ("a", ["a", "b", "c"], [0, 1, 1])
        assert found.token_logprobs == [-0.5] * 3
        for off in (False, None):
            body = {"logprobs": off}
            assert (await create(model="laminar", prompt="twice", extra_body=body)).choices[0].logprobs is None

    play(ScriptedRun("abc", "two$", "two$"), scenario)


def test_client_raises_the_errors_of_its_package() -> None:
    async def scenario(run: ScriptedRun, http: httpx2.AsyncClient) -> None:
        client = client_of(run, http)
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(model="laminar", messages=[{"role": "user", "content": "x" * 400}])
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").models.list()

    play(ScriptedRun("two$"), scenario)
