"""The gateway over HTTP: conversations, repetitions, failures of owners and gateways, and bad input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from gateway_harness import NAME, ForgettingTokenizer, ScriptedRun, chat, play, user

from infra.kafka.producer import DeliveryFailed
from operators.gateway.play import Player
from schemas.records import EpisodeEnd, TokenRange, TurnRequest

HELLO, AGAIN = user("hello"), user("again")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def turns(run: ScriptedRun) -> list[TurnRequest]:
    return [order for order in run.orders if isinstance(order, TurnRequest)]


def test_a_conversation_extends_its_recorded_tokens() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        body = await chat(client, HELLO)
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hi"}
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == len("U:hello$\nA:")
        assert body["usage"]["completion_tokens"] == 3
        body = await chat(client, HELLO, choice["message"], AGAIN)
        assert body["choices"][0]["message"]["content"] == "ho"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 14
        first, second = turns(run)
        assert run.recorded(first) == "U:hello$\nA:"
        assert second.context == (TokenRange(0, 14),)
        assert run.recorded(second) == "U:hello$\nA:hi$\nU:again$\nA:"

    play(ScriptedRun("hi$", "ho$"), scenario)


def test_an_edited_history_branches_where_it_differs() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        said = (await chat(client, HELLO))["choices"][0]["message"]
        await chat(client, HELLO, said, AGAIN)
        await chat(client, HELLO, said, user("other"))
        await chat(client, HELLO, {**said, "content": "invented"}, AGAIN)
        _, again, other, invented = turns(run)
        assert other.context == again.context == (TokenRange(0, 14),)
        assert other.start > again.start
        assert invented.context == ()
        assert run.recorded(invented) == "U:hello$\nA:invented$\nU:again$\nA:"
        (segment,) = run.table.segments(NAME, "last", 1000).segments
        assert segment.ranges[0].start == invented.start

    play(ScriptedRun("hi$", "ho$", "hu$", "he$"), scenario)


def test_equal_requests_get_new_responses_retries_recorded_ones() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        texts = [(await chat(client, HELLO))["choices"][0]["message"]["content"] for _ in range(2)]
        assert texts == ["one", "two"]
        assert turns(run)[1].context == turns(run)[0].context or turns(run)[1].token_ids.to_pylist() == []
        client.headers["x-stainless-retry-count"] = "1"
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == "two"
        del client.headers["x-stainless-retry-count"]
        client.headers["authorization"] += "~1"  # the agent's next attempt
        texts = [(await chat(client, HELLO))["choices"][0]["message"]["content"] for _ in range(2)]
        assert texts == ["one", "two"]
        assert len(run.orders) == 2

    play(ScriptedRun("one$", "two$"), scenario)


def test_idempotency_key_is_exact_at_every_gateway() -> None:
    """Two processes count equal requests each for itself, so without it both give the first response."""

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        async def said(at: httpx2.AsyncClient, key: str) -> Any:
            at.headers["idempotency-key"] = key
            return (await chat(at, HELLO))["choices"][0]["message"]["content"]

        assert await said(client, "a") == "one"
        transport = httpx2.ASGITransport(app=run.open().application())
        async with httpx2.AsyncClient(transport=transport, base_url=client.base_url, headers=client.headers) as other:
            assert [await said(other, key) for key in ("b", "a", "b")] == ["two", "one", "two"]
        assert len(run.orders) == 2

    play(ScriptedRun("one$", "two$"), scenario)


def test_choices_share_the_recorded_prompt() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        body = await chat(client, HELLO, n=2)
        assert [each["message"]["content"] for each in body["choices"]] == ["one", "two"]
        assert [len(each.token_ids) for each in turns(run)] == [11, 0]

    play(ScriptedRun("one$", "two$"), scenario)


def test_another_gateway_continues_the_conversation() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        said = (await chat(client, HELLO))["choices"][0]["message"]
        transport = httpx2.ASGITransport(app=run.open().application())
        async with httpx2.AsyncClient(transport=transport, base_url=client.base_url, headers=client.headers) as other:
            assert (await chat(other, HELLO))["choices"][0]["message"] == said  # recorded
            await chat(other, HELLO, said, AGAIN)
        assert [each.context for each in turns(run)] == [(), (TokenRange(0, 14),)]

    play(ScriptedRun("hi$", "ho$"), scenario)


@pytest.mark.parametrize("keep", [0, 12])
def test_a_turn_is_repeated_at_the_next_owner(keep: int) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        said = (await chat(client, HELLO))["choices"][0]["message"]
        run.paused = True
        request = asyncio.create_task(chat(client, HELLO, said, AGAIN))
        while len(run.orders) < 2:
            await asyncio.sleep(0)
        run.paused = False
        run.assign(lease=2, keep=keep or 14)
        assert (await request)["choices"][0]["message"]["content"] == "ho"
        last = turns(run)[-1]
        assert (last.lease, last.replica) == (2, 2)
        if keep:  # the response to the first request is lost, and encoded as text
            assert last.context == ()
            assert run.recorded(last) == "U:hello$\nA:hi$\nU:again$\nA:"
        else:
            assert last.context == (TokenRange(0, 14),)

    play(ScriptedRun("hi$", "ho$"), scenario)


def test_tool_calls_are_parsed_and_results_extend_conversations() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        (choice,) = (await chat(client, HELLO, tools=TOOLS))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
        call = {**call, "id": "mine", "function": {"name": "add", "arguments": '{"a":1}'}}
        result = {"role": "tool", "tool_call_id": "mine", "content": "2"}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        await chat(client, HELLO, said, result, tools=TOOLS)
        assert len(turns(run)[1].context) == 1
        assert run.recorded(turns(run)[1]).endswith("</tool_call>$\nT:2$\nA:")
        (choice,) = (await chat(client, AGAIN, tools=TOOLS))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "<tool_call>{bad</tool_call>"}

    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    play(ScriptedRun(f"{call}$", "3$", "<tool_call>{bad</tool_call>$", budget=600), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_request_without_calls_extends_one_with_tools(stream: bool) -> None:
    """`tool_choice: none` is a request for text: the template renders the tools as before."""
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        said = (await chat(client, HELLO, tools=TOOLS))["choices"][0]["message"]
        body = {"messages": [HELLO, said, AGAIN], "tools": TOOLS, "tool_choice": "none", "stream": stream}
        response = await client.post("/chat/completions", json=body)
        assert json.dumps(text)[1:-1] in response.text
        assert "tool_calls" not in response.text
        assert turns(run)[1].context == (TokenRange(0, 19),)
        assert run.recorded(turns(run)[1]) == "[add]U:hello$\nA:hi$\nU:again$\nA:"

    play(ScriptedRun("hi$", f"{text}$"), scenario)


def test_a_stop_string_is_recorded_but_not_returned() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        said = (await chat(client, user("1+1="), stop=["</c>"]))["choices"][0]["message"]
        assert said["content"] == "<c>1"
        await chat(client, user("1+1="), said, user("=2"))
        assert run.recorded(turns(run)[1]) == "1+1=<c>1</c>=2"

    play(ScriptedRun("<c>1</c>", "2$", plain=True), scenario)


@pytest.mark.parametrize(("asked", "answer"), [("hello (quietly)", "hi"), ("hello", "(a greeting) hi")])
def test_a_template_that_rewrites_history_is_reported(asked: str, answer: str) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        question = user(asked)
        body = {"messages": [question]}
        first = await client.post("/chat/completions", json=body)
        said = first.json()["choices"][0]["message"]
        turns_of = {"messages": [question, said, AGAIN]}
        second = await client.post("/chat/completions", json=turns_of)
        client.headers["x-stainless-retry-count"] = "1"
        streamed = await client.post("/chat/completions", json={**turns_of, "stream": True})
        items = {"input": [question, said, AGAIN]}
        more = [await client.post("/responses", json={**items, "stream": each}) for each in (False, True)]
        transport = httpx2.ASGITransport(app=run.open().application())
        async with httpx2.AsyncClient(transport=transport, base_url=client.base_url, headers=client.headers) as other:
            again = await other.post("/chat/completions", json=turns_of)  # another process, which has not planned it
        responses = (first, second, streamed, *more, again)
        reported = [each.headers.get("laminar-template") for each in responses]
        assert reported == [None, *["rewritten"] * 5]
        assert [each.rewritten for each in turns(run)] == [False, True]
        assert run.recorded(turns(run)[1]) == f"U:{asked}$\nA:{answer}$\nU:again$\nA:"

    play(ScriptedRun(f"{answer}$", "ho$", tokenizer=ForgettingTokenizer()), scenario)


def test_a_completion_extends_the_recorded_text() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        async def complete(prompt: str) -> str:
            response = await client.post("/completions", json={"prompt": prompt, "stop": "!"})
            return str(response.json()["choices"][0]["text"])

        assert await complete("one") == " two"
        assert await complete("one two! three") == " four"
        assert await complete("one two!") == " five"
        assert [run.recorded(each) for each in turns(run)] == ["one", "one two! three", "one two!"]
        assert [bool(each.context) for each in turns(run)] == [False, True, True]

    play(ScriptedRun(" two!", " four!", " five!"), scenario)


def test_a_stream_has_the_deltas_of_the_response() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        body = {"messages": [HELLO], "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/chat/completions", json=body)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        events = [json.loads(line) for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
        deltas = [each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"]]
        assert "".join(deltas) == "hi"
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == 3

    play(ScriptedRun("hi$"), scenario)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_failure_in_a_stream_is_an_event_that_ends_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = Player.follow

    async def failing(*of: Any) -> AsyncIterator[Any]:
        async for each in follow(*of):
            yield each
            raise DeliveryFailed("no broker")

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        response = await client.post(path, json={"messages": [HELLO], "input": "hello", "stream": True})
        assert response.status_code == 200
        last = json.loads(response.text.strip().rpartition("data: ")[2])
        assert "the log is not available; repeat the request" in str(last)

    monkeypatch.setattr(Player, "follow", failing)
    play(ScriptedRun("hi$"), scenario)


def test_end_reports_the_last_conversation_and_closes_it() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        await chat(client, HELLO)
        response = await client.post("/episode/end", json={"reward": 0.5, "answer": "hi"})
        assert response.json() == {"episode": NAME, "finished": True, "error": None}
        end = run.orders[-1]
        assert isinstance(end, EpisodeEnd)
        assert (end.reward, end.answer, end.segments[0].prompt_tokens) == (0.5, "hi", 11)
        again = await client.post("/episode/end", json={"reward": 1.0})  # an agent that answers twice
        assert (again.status_code, len(run.orders)) == (200, 2), "the first report counts"
        error = (await chat(client, AGAIN))["error"]
        assert error["code"] == "episode_ended"

    play(ScriptedRun("hi$"), scenario)


@pytest.mark.parametrize("key", ["", "lm-p0.0-" + "0" * 40, "lm-p0.0", "other", "lm-p0.1-x"])
def test_an_unknown_key_is_rejected(key: str) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        client.headers["authorization"] = f"Bearer {key}"
        response = await client.get("/models")
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")

    play(ScriptedRun(), scenario, key="")


def test_the_key_may_be_in_the_path() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        del client.headers["authorization"]
        response = await client.get(f"http://gateway/k/{run.keys.key_of(NAME)}/v1/models")
        assert response.json()["data"][0]["id"] == "laminar"

    play(ScriptedRun(), scenario)


def test_request_without_response_times_out_and_is_repeatable() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        run.paused = True
        assert (await chat(client, HELLO))["error"]["type"] == "timeout"
        run.respond(run.orders[0])
        client.headers["x-stainless-retry-count"] = "1"
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == "hi"
        assert len(run.orders) == 1

    play(ScriptedRun("hi$", turn_timeout_s=0.05), scenario)


def test_request_that_is_too_large_for_the_log_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.codec.MAX_VALUE_BYTES", 2000)

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        body = json.dumps({"messages": [{**HELLO, "more": [1] * 700}]}, separators=(",", ":"))
        response = await client.post("/chat/completions", content=body)
        assert (response.status_code, len(body) < 2000) == (413, True)
        assert "the request cannot be recorded: TurnRequest/3 of" in response.json()["error"]["message"]
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == "hi"
        ended = await client.post("/episode/end", json={"answer": "a" * 2000})
        assert (ended.status_code, ended.json()["error"]["message"][:23]) == (413, "the request cannot be r")

    play(ScriptedRun("hi$"), scenario)


def test_report_gives_conversations_rewards_by_ids_of_responses() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        first, aside = await chat(client, HELLO), await chat(client, user("aside"))
        body = {"reward": 1.0, "rewards": {first["id"]: 0.25, aside["id"]: 0.5}}
        assert (await client.post("/episode/end", json=body)).status_code == 200
        end = run.orders[-1]
        assert isinstance(end, EpisodeEnd)
        assert (end.reward, end.rewards, len(end.segments)) == (1.0, (0.5,), 1)  # branches = "last"

    play(ScriptedRun("hi$", "ho$"), scenario)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"chatcmpl-none": 1.0}, "no response of this episode has the id none; use the `id` of a response"),
        (dict.fromkeys("abcde", 1), "no response of this episode has the id a, b, c and 2 more"),
        ([0.5, 1.0], "rewards must be an object: a number for each id of a response, not [0.5, 1.0]"),
        ({"a": float("nan")}, "the reward of a must be a finite number, at most 1e+38, not nan"),
        ({"a": 10**400}, "the reward of a must be a finite number, at most 1e+38, not 1000"),
        ({"a": True}, "the reward of a must be a finite number, at most 1e+38, not True"),
        ({"a": None}, "the reward of a must be a finite number, at most 1e+38, not None"),
    ],
)
def test_invalid_rewards_of_a_report_are_errors(rewards: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.gateway.play.KNOWN_S", 0.01)

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        await chat(client, HELLO)
        response = await client.post("/episode/end", content=json.dumps({"rewards": rewards}))
        error = response.json()["error"]
        assert (response.status_code, message in error["message"], error["param"]) == (400, True, "rewards"), error
        assert not any(isinstance(each, EpisodeEnd) for each in run.orders)
        assert (await client.post("/episode/end", json={"reward": 1})).status_code == 200, "the episode goes on"

    play(ScriptedRun("hi$"), scenario)


def test_report_names_a_turn_whose_tokens_a_move_has_lost() -> None:
    """Its conversation is not trained, but its id is no error: the agent has got the response."""

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        lost = await chat(client, HELLO)
        run.assign(lease=2)
        kept = await chat(client, user("again"))
        body = {"rewards": {lost["id"]: 0.25, kept["id"]: 0.5}}
        assert (await client.post("/episode/end", json=body)).status_code == 200
        end = run.orders[-1]
        assert isinstance(end, EpisodeEnd)
        assert end.rewards == (0.5,)

    play(ScriptedRun("hi$", "ho$"), scenario)
