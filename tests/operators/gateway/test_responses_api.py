"""The Responses API, with the client of the package openai."""

from __future__ import annotations

import httpx2
import openai
import pytest
from gateway_harness import ScriptedRun, play
from test_openai_client import CALL, client_of

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def test_responses_extend_their_own_output_items() -> None:
    async def scenario(run: ScriptedRun, http: httpx2.AsyncClient) -> None:
        client = client_of(run, http)
        items: list = [{"role": "user", "content": "hello"}]
        first = await client.responses.create(model="laminar", instructions="sum", input=items, tools=[ADD])
        (call,) = first.output
        assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        second = await client.responses.create(model="laminar", instructions="sum", input=items, tools=[ADD])
        assert second.output_text == "two"
        assert second.usage.input_tokens_details.cached_tokens > 0
        items += [*second.output, {"role": "user", "content": "again"}]
        third = await client.responses.create(
            model="laminar", instructions="sum", input=items, tools=[ADD], max_output_tokens=2
        )
        assert (third.status, third.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [bool(order.context) for order in run.orders] == [False, True, True]

    play(ScriptedRun(f"{CALL}$", "two$", "three$"), scenario)


@pytest.mark.parametrize("tools", [[], [ADD]])
def test_stream_of_a_response_has_its_events(tools: list) -> None:
    async def scenario(run: ScriptedRun, http: httpx2.AsyncClient) -> None:
        stream = await client_of(run, http).responses.create(model="laminar", input="hello", tools=tools, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "two"
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert events[-1].response.output_text == "two"

    play(ScriptedRun("two$"), scenario)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input must be text or a list"),
        ({"input": ["x"]}, r"input\[0\] must be an object"),
        ({"input": [{"type": "image"}]}, "has type 'image', which is not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "other tools are not supported"),
        ({"input": "x", "previous_response_id": "resp_1"}, "send the whole input"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "response_format must be text"),
    ],
)
def test_unsupported_requests_are_errors(body: dict, message: str) -> None:
    async def scenario(run: ScriptedRun, http: httpx2.AsyncClient) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            await client_of(run, http).post("/responses", body=body, cast_to=object)

    play(ScriptedRun(), scenario)
