"""Keys that are not of an episode: people talk to weight versions, programs elsewhere claim episodes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_harness import NAME, ScriptedRun, chat, user

from operators.gateway import served_versions
from operators.gateway.app import MAX_EPISODE_REQUESTS, Gateway
from operators.gateway.claims import ClaimRequests, Claims
from operators.gateway.served_versions import ServedSampling, ServedVersions
from operators.io.episode_keys import PEOPLE, WORKERS
from schemas.records import EpisodeEnd

COMMAND = (sys.executable, str(Path(__file__).with_name("scripted_serving.py")))
Scenario = Callable[[Gateway, httpx2.AsyncClient], Awaitable[None]]


def play(run: ScriptedRun, holder: str, folder: Path, scenario: Scenario, *, served: bool = True) -> None:
    """Run `scenario` with a client that has the key of `holder`."""

    async def main() -> None:
        gateway = run.open()
        claims = Claims(run.table, 0, 1, 60.0, 1, time.monotonic)
        gateway.claims = ClaimRequests(claims, gateway.player, gateway.keys)
        if served:
            gateway.served = ServedVersions(COMMAND, 2, folder / "serving.log")
        run.assign()
        headers = {"authorization": f"Bearer {run.keys.key_of(holder)}"}
        transport = httpx2.ASGITransport(app=gateway.application())
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway/v1", headers=headers) as client:
            try:
                await scenario(gateway, client)
            finally:
                if gateway.served is not None:
                    gateway.served.close()

    asyncio.run(main())


def test_people_choose_a_version_and_see_those_there_are(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        for model, content in (("laminar", "new"), ("laminar:latest", "new"), ("laminar:v1", "one")):
            body = await chat(client, user("hello"), model=model)
            assert body["choices"][0]["message"]["content"] == content
            assert body["usage"]["completion_tokens"] == 3
        body = await chat(client, user("hello"), model="laminar:v1", max_tokens=2)
        assert body["choices"][0]["message"]["content"] == "on"
        models = (await client.get("/models")).json()["data"]
        assert [each["id"] for each in models] == ["laminar", "laminar:latest", "laminar:1.1", "laminar:1.2"]

    run = ScriptedRun()
    play(run, PEOPLE, tmp_path, scenario)
    assert run.orders == [], "nothing of it is in the log"


def test_people_get_streams_completions_and_responses(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        options = {"model": "laminar:v1", "messages": [user("hello")], "stream": True}
        lines = (await client.post("/chat/completions", json=options)).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events) == "one"
        body = (await client.post("/completions", json={"model": "laminar:v1", "prompt": "hello"})).json()
        assert body["choices"][0]["text"] == "one"
        body = (await client.post("/responses", json={"model": "laminar:v1", "input": "hello"})).json()
        assert body["output"][0]["content"][0]["text"] == "one"

    play(ScriptedRun(), PEOPLE, tmp_path, scenario)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"model": "gpt-4"}, 404, "there is no model 'gpt-4': use laminar:latest"),
        ({"model": "laminar:v9"}, 400, "no such version"),
        ({"model": "laminar", "messages": [user("x" * 500)]}, 400, "the model's context is 400"),
        ({"model": "laminar", "temperature": 9}, 400, "temperature must be a number from 0 to 2, not 9"),
        ({"model": "laminar", "top_p": "x"}, 400, "top_p must be a number"),
    ],
)
def test_bad_requests_of_people_are_rejected(
    options: dict[str, Any], status: int, message: str, tmp_path: Path
) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        response = await client.post("/chat/completions", json={"messages": [user("hello")], **options})
        assert response.status_code == status
        assert message in response.json()["error"]["message"]

    play(ScriptedRun(), PEOPLE, tmp_path, scenario)


def test_a_serving_process_that_ends_is_started_again(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        prompt = "x" * 13
        response = await client.post("/completions", json={"model": "laminar", "prompt": prompt})
        assert response.status_code == 503
        assert "the serving process has ended" in response.json()["error"]["message"]
        body = await chat(client, user("hello"))
        assert body["choices"][0]["message"]["content"] == "new"

    play(ScriptedRun(), PEOPLE, tmp_path, scenario)


def test_people_have_no_more_requests_at_once_than_configured(tmp_path: Path) -> None:
    async def main() -> None:
        served = ServedVersions(COMMAND, 2, tmp_path / "serving.log")
        held = [served.follow("v1", [1], ServedSampling(3, ())) for _ in range(2)]
        for each in held:
            assert (await anext(each)).token_ids
        third = asyncio.create_task(anext(served.follow("v1", [1], ServedSampling(3, ()))))
        await asyncio.sleep(0)  # it waits for a place; without one it would be sent now
        await served.versions()  # what was sent before this has its response
        await asyncio.sleep(0)
        assert not third.done()
        await held[0].aclose()
        assert (await third).token_ids
        served.close()

    asyncio.run(main())


def test_close_kills_a_process_group_only_until_it_is_reaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed: list[int] = []
    monkeypatch.setattr(served_versions.os, "killpg", lambda group, _: killed.append(group))

    async def main() -> None:
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        work = tmp_path / "work"
        (work / "1").mkdir(parents=True)
        served = ServedVersions(COMMAND, 2, tmp_path / "serving.log", work=work)
        served._running = served_versions._Process(process)
        served.close()
        assert killed == [process.pid]
        assert not work.exists(), "versions that the process pulled"
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        served.close()
        assert killed == [process.pid]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("holder", "path", "served", "message"),
    [
        (PEOPLE, "chat/completions", False, "gateway.serve_requests is 0"),
        (PEOPLE, "episode/end", True, "not that of an episode"),
        (PEOPLE, "episodes/claim", True, "are claimed with the key of"),
        (WORKERS, "chat/completions", True, "requests need the key of one"),
        (WORKERS, "episode/end", True, "not that of an episode"),
    ],
)
def test_a_key_is_valid_for_its_holder_only(holder: str, path: str, served: bool, message: str, tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        response = await client.post(f"/{path}", json={"messages": [user("hello")]})
        assert response.status_code == 403
        assert message in response.json()["error"]["message"]

    play(ScriptedRun(), holder, tmp_path, scenario, served=served)


def test_a_worker_claims_an_episode_and_plays_it(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        claimed = (await client.post("/episodes/claim", json={})).json()
        assert (claimed["episode"], claimed["attempt"]) == (NAME, 0)
        assert (claimed["task"]["text"], claimed["timeout_s"]) == ("question 0", 60.0)
        assert claimed["turn_timeout_s"] == run.config.turn_timeout_s
        assert (await client.post("/episodes/claim", json={})).status_code == 204
        client.headers["authorization"] = f"Bearer {claimed['key']}"
        assert (await chat(client, user("hello")))["choices"][0]["message"]["content"] == "hi"
        assert (await client.post("/episode/end", json={"reward": 1})).json()["finished"]

    run = ScriptedRun("hi$")
    play(run, WORKERS, tmp_path, scenario)


def test_a_claim_waits_for_an_episode(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        await client.post("/episodes/claim", json={})
        waiting = asyncio.create_task(client.post("/episodes/claim", json={"wait_s": 30}))
        assert (await client.post("/episodes/claim", json={})).status_code == 204, "another one does not wait"
        given = {"episode": NAME, "attempt": 0, "error": None}
        assert (await client.post("/episodes/release", json=given)).json()["again"]
        assert (await waiting).json()["attempt"] == 1

    play(ScriptedRun(), WORKERS, tmp_path, scenario)


def test_claim_does_not_wait_for_the_end_of_a_failed_episode(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        now = 0.0
        assert gateway.claims is not None
        gateway.claims.claims = Claims(run.table, 0, 1, 60.0, 0, lambda: now)
        await client.post("/episodes/claim", json={})
        run.paused = True  # the owner of the episode is away
        now = 60.0
        for _ in range(2):
            assert (await client.post("/episodes/claim", json={})).status_code == 204
        (ending,) = gateway.claims.ending.values()
        while not run.orders:
            await asyncio.sleep(0)
        run.respond(run.orders[0])
        await ending
        assert len(run.orders) == 1
        assert run.table.error_of(NAME) == "no agent finished it in time"

    run = ScriptedRun()
    play(run, WORKERS, tmp_path, scenario)


def test_workers_may_use_half_of_the_places_of_requests(tmp_path: Path) -> None:
    """Each waiting agent of all programs elsewhere has a claim; the other half is left to requests of episodes."""
    places = 4 * MAX_EPISODE_REQUESTS

    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        await client.post("/episodes/claim", json={})
        waiting = [asyncio.create_task(client.post("/episodes/claim", json={"wait_s": 60})) for _ in range(places // 2)]
        while gateway.active[WORKERS] < places // 2:
            await asyncio.sleep(0)
        assert (await client.post("/episodes/claim", json={})).status_code == 429
        client.headers["authorization"] = f"Bearer {gateway.keys.key_of(NAME)}"
        assert (await client.get("/models")).status_code == 200
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    play(ScriptedRun(max_requests=places), WORKERS, tmp_path, scenario)


def test_a_claim_by_a_client_that_has_gone_is_undone(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        messages = [{"type": "http.request", "body": b"{}"}]
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "method": "POST", "path": "/v1/episodes/claim", "query_string": b"", "client": None}
        scope["headers"] = [(b"authorization", client.headers["authorization"].encode())]
        await gateway.application()(scope, receive, send)
        assert statuses[0] == 204
        claimed = (await client.post("/episodes/claim", json={})).json()
        assert (claimed["episode"], claimed["attempt"]) == (NAME, 1)

    play(ScriptedRun(), WORKERS, tmp_path, scenario)


def test_a_serving_process_that_hangs_does_not_hold_requests(tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        gateway.served = ServedVersions(
            (sys.executable, "-c", "input()\nwhile 1: input()"), 1, tmp_path / "log", 300, 0.1
        )
        response = await client.post("/chat/completions", json={"messages": [user("hello")], "model": "laminar"})
        assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout")

    play(ScriptedRun(), PEOPLE, tmp_path, scenario, served=False)


def test_an_episode_ends_with_the_error_of_its_last_attempt(tmp_path: Path) -> None:
    run = ScriptedRun()

    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        for again in (True, False):
            claimed = (await client.post("/episodes/claim", json={})).json()
            given = {"episode": claimed["episode"], "attempt": claimed["attempt"], "error": "exit status 3"}
            assert (await client.post("/episodes/release", json=given)).json()["again"] == again
        end = run.orders[-1]
        assert isinstance(end, EpisodeEnd)
        assert end.error == "exit status 3"

    play(run, WORKERS, tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("claim", {"wait_s": 1e9}, "wait_s must be from 0 to 60 seconds"),
        ("claim", {"wait_s": "x"}, "wait_s must be from 0 to 60 seconds"),
        ("claim", [], "wait_s must be"),
        ("release", {"episode": NAME}, "attempt must be the number"),
        ("release", {"episode": "../x", "attempt": 0, "error": "e"}, "episode must be the id of one"),
        ("release", {"episode": NAME, "attempt": 0, "error": 1}, "error must be text"),
        ("release", [], "episode must be the id of one"),
    ],
)
def test_bad_requests_of_workers_are_rejected(path: str, body: Any, message: str, tmp_path: Path) -> None:
    async def scenario(gateway: Gateway, client: httpx2.AsyncClient) -> None:
        response = await client.post(f"/episodes/{path}", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]

    play(ScriptedRun(), WORKERS, tmp_path, scenario)
