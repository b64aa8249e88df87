"""Encoding of long texts: a thread for each holder at most, and none of those that write to the log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from gateway_harness import NAME, LetterTokenizer, ScriptedRun, chat, user
from test_gateway_holders import play

from operators.gateway.app import Gateway
from operators.gateway.encoding import THREADS, EncodingThreads
from operators.io.episode_keys import PEOPLE


class Held:
    """Work that lasts until `released`; `begun` are the names of what has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.released = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.released.wait(60)
            return name

        return run

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)


async def cancel(task: asyncio.Task[str]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def test_work_of_a_client_that_has_gone_keeps_its_turn() -> None:
    async def main() -> None:
        encoder, held = EncodingThreads(), Held()
        first = asyncio.create_task(encoder.run("p0.0", held.work("first")))
        await held.until_begun(1)
        await cancel(first)
        second = asyncio.create_task(encoder.run("p0.0", held.work("second")))
        other = asyncio.create_task(encoder.run("p1.0", held.work("other")))
        await held.until_begun(2)
        assert held.begun == ["first", "other"]
        held.released.set()
        assert [await second, await other] == ["second", "other"]

    asyncio.run(main())


def test_work_that_has_not_begun_is_left_with_its_client() -> None:
    async def main() -> None:
        encoder, held = EncodingThreads(), Held()
        running = [asyncio.create_task(encoder.run(str(n), held.work(str(n)))) for n in range(THREADS)]
        await held.until_begun(THREADS)
        waiting = asyncio.create_task(encoder.run("p0.0", held.work("gone")))
        await asyncio.sleep(0)
        await cancel(waiting)
        held.released.set()
        await asyncio.gather(*running)
        assert await encoder.run("p0.0", held.work("next")) == "next"
        assert "gone" not in held.begun

    asyncio.run(main())


def test_long_texts_of_people_delay_no_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    encode, held = LetterTokenizer.encode, Held()

    def encode_slowly(own: LetterTokenizer, text: str, **options: object) -> list[int]:
        if "long" in text:
            held.work(text)()
        return encode(own, text, **options)

    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        monkeypatch.setattr(LetterTokenizer, "encode", encode_slowly)
        asked = [asyncio.create_task(chat(client, user("long"))) for _ in range(40)]
        await held.until_begun(1)
        key = {"authorization": f"Bearer {run.keys.key_of(NAME)}"}
        response = await client.post("/chat/completions", json={"messages": [user("hello")]}, headers=key)
        assert response.json()["choices"][0]["message"]["content"] == "hi"
        assert len(held.begun) == 1
        held.released.set()
        assert all([(await each)["choices"] for each in asked])

    run = ScriptedRun("hi$")
    play(run, PEOPLE, tmp_path, scenario)
