"""Requests that the gateway refuses, and long ones: neither blocks an episode or the requests of others."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx2
import pytest
from gateway_harness import LetterTokenizer, ScriptedRun, chat, play, user

HELLO = user("hello")


def test_empty_request_is_an_error_and_blocks_nothing() -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        assert "the request has no tokens" in (await chat(client, user("")))["error"]["message"]
        assert not run.orders
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == "hi"

    play(ScriptedRun("hi$", plain=True), scenario)


def test_text_beyond_the_context_is_refused_without_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = LetterTokenizer.encode
    monkeypatch.setattr(LetterTokenizer, "encode", lambda own, text, **of: encoded.append(1) or encode(own, text, **of))

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        error = (await chat(client, user("x" * 401)))["error"]
        context = "the model's context is 400 tokens, at most 400 characters"
        assert error["message"] == f"the request has 401 characters, but {context}"
        assert error["code"] == "context_length_exceeded"
        assert not encoded
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == "hi"

    play(ScriptedRun("hi$"), scenario)


@pytest.mark.parametrize("name", ["answer", "error"])
def test_long_texts_of_reports_are_refused(name: str) -> None:
    """A trajectory with them would not fit a record: each of its owners would end."""

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        response = await client.post("/episode/end", json={name: "é" * 500_001})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name)
        assert error["message"] == f"{name} has 1000002 bytes as UTF-8, more than 1000000: shorten it"
        assert (await client.post("/episode/end", json={name: "é" * 500_000})).status_code == 200

    play(ScriptedRun("hi$", max_body_bytes=10**7), scenario)


def test_others_are_answered_while_a_long_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoding, answered = LetterTokenizer.encode, threading.Event(), threading.Event()

    def encode_slowly(own: LetterTokenizer, text: str, **options: Any) -> list[int]:
        if "hello" in text:
            encoding.set()
            assert answered.wait(60)
        return encode(own, text, **options)

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        monkeypatch.setattr(LetterTokenizer, "encode", encode_slowly)
        request = asyncio.create_task(chat(client, HELLO))
        while not encoding.is_set():
            await asyncio.sleep(0.001)
        assert (await client.get("/episode")).status_code == 200
        run.write("inbox")  # the fold has the table meanwhile
        answered.set()
        assert (await request)["choices"][0]["message"]["content"] == "hi"

    play(ScriptedRun("hi$"), scenario)


@pytest.mark.parametrize(("model", "status"), [("laminar:1.3", 404), ("laminar:latest", 200), ("gpt-4o", 200)])
def test_agents_get_responses_of_the_trained_policy_alone(model: str, status: int) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        response = await client.post("/chat/completions", json={"model": model, "messages": [HELLO]})
        assert response.status_code == status
        assert len(run.orders) == (status == 200)

    play(ScriptedRun("hi$"), scenario)


@pytest.mark.parametrize(
    ("name", "value", "text"), [("echo", True, "True"), ("suffix", "x", "'x'"), ("best_of", 2, "2")]
)
def test_unsupported_parameters_of_completions_are_errors(name: str, value: Any, text: str) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        response = await client.post("/completions", json={"prompt": "one", name: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name)
        assert error["message"] == f"{name} = {text} is not supported: leave it out"

    play(ScriptedRun(), scenario)


@pytest.mark.parametrize("parameter", [{"n": 2, "best_of": 2}, {"best_of": 1}, {"echo": False}, {"suffix": ""}])
def test_parameters_of_completions_without_effect_are_accepted(parameter: dict[str, Any]) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        body = (await client.post("/completions", json={"prompt": "one", **parameter})).json()
        assert len(body["choices"]) == parameter.get("n", 1)

    play(ScriptedRun("hi$", "ho$"), scenario)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "king", "content": ""}]}, 400, "messages[0] must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"image_url": "x"}]}]}, 400, "text or a list of text parts"),
        ({"messages": [HELLO], "n": 0}, 400, "n must be an integer from 1 to 16, not 0"),
        ({"messages": [HELLO], "max_tokens": "x"}, 400, "max_tokens must be an integer"),
        ({"messages": [HELLO], "stop": [""]}, 400, "stop must be"),
        ({"messages": [HELLO], "tools": [{"type": "x"}]}, 400, "tools must be a list of functions"),
        ({"messages": [HELLO], "response_format": {"type": "json_object"}}, 400, "response_format must be text"),
        ({"messages": [HELLO], "tool_choice": "required"}, 400, 'must be "auto" or "none", not \'required\''),
        ({"messages": [HELLO], "tool_choice": {"type": "function"}}, 400, "the engine cannot constrain responses"),
        ({"messages": [user("x" * 400)]}, 400, "the model's context is 400"),
        ({"messages": [user("x" * 299)]}, 400, "of the 300 tokens of this episode"),
        ({"messages": [{"role": "function", "content": "x"}]}, 400, "the chat template fails on messages of function"),
        (["x"], 400, "the body must be a JSON object"),
        ("{", 400, "the body is not valid JSON"),
        ({"messages": [user("x" * 2000)]}, 413, "the body is larger than 1000 bytes"),
    ],
)
def test_bad_requests_get_errors_in_openai_shape(body: Any, status: int, message: str) -> None:
    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        content = body if isinstance(body, str) else json.dumps(body)
        response = await client.post("/chat/completions", content=content)
        error = response.json()["error"]
        assert (response.status_code, message in error["message"]) == (status, True), error
        assert error.keys() == {"message", "type", "param", "code"}
        assert not run.orders

    play(ScriptedRun("hi$", max_body_bytes=1000), scenario)
