"""Orders of the gateway to the owner of an episode: each turn is sent once, and again only if nothing comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from gateway_harness import ScriptedRun, chat, play, user

from operators.gateway import play as turn_player

HELLO = user("hello")


def test_order_of_a_turn_is_sent_by_its_own_request() -> None:
    """Others wait: if each sent the pending order at each change, n requests at once would write n² records."""

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        run.paused = True
        requests = [asyncio.create_task(chat(client, user(text))) for text in "abc"]
        for at in range(3):
            while len(run.orders) <= at:
                await asyncio.sleep(0)
            run.respond(run.orders[at])
        bodies = [await each for each in requests]
        assert {body["choices"][0]["message"]["content"] for body in bodies} == {"one", "two", "six"}
        assert len(run.orders) == 3

    play(ScriptedRun("one$", "two$", "six$"), scenario)


def test_order_that_changes_nothing_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_player, "SEND_AGAIN_S", 0.05)
    monkeypatch.setattr(turn_player, "_RECHECK_S", 0.01)

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        run.paused = True  # the owner gets nothing
        request = asyncio.create_task(chat(client, HELLO))
        while len(run.orders) < 2:
            await asyncio.sleep(0.01)
        run.respond(run.orders[1])
        assert (await request)["choices"][0]["message"]["content"] == "hi"
        assert len({each.turn_id for each in run.orders}) == 1

    play(ScriptedRun("hi$"), scenario)


def test_order_is_not_sent_again_while_tokens_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_player, "_RECHECK_S", 0.001)
    opened, now, waits, wait = [], [0.0], [], turn_player.Player._wait

    async def counted(*of: Any, **options: Any) -> None:
        waits.append(now[0])
        await wait(*of, **options)

    async def looks_again() -> None:
        """Return once the request has looked at its episode."""
        seen = len(waits)
        while len(waits) < seen + 3:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(turn_player.Player, "_wait", counted)
    open_gateway = ScriptedRun.open
    monkeypatch.setattr(ScriptedRun, "open", lambda run: opened.append(open_gateway(run)) or opened[0])

    async def scenario(run: ScriptedRun, client: httpx2.AsyncClient) -> None:
        monkeypatch.setattr(opened[0].player, "_clock", lambda: now[0])
        run.paused = True
        request = asyncio.create_task(chat(client, HELLO))
        while not waits:  # it has sent its order
            await asyncio.sleep(0)
        for _ in range(2):
            now[0] += 10.0
            run.gain(run.orders[0], 1)
            await looks_again()
            assert len(run.orders) == 1
        now[0] += 16.0
        while len(run.orders) == 1:
            await asyncio.sleep(0.001)
        for _ in range(3):  # together longer than turn_timeout_s
            now[0] += 400.0
            run.gain(run.orders[0], 1)
            await looks_again()
            assert not request.done()
        now[0] += 601.0
        assert (await request)["error"]["type"] == "timeout"

    play(ScriptedRun("hi$"), scenario)
