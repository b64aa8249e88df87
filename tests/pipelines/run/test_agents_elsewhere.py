"""`laminar agents play`: claims, results and failures of agents of another machine, with a gateway of a few lines."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.machine import machine_name
from operators.io.episode_keys import WORKERS
from pipelines.cli.agents import KEY_VARIABLE, _served_text
from pipelines.inspect.run_folders import laminar_command
from pipelines.run.agents_elsewhere import RemoteAgents
from pipelines.run.gateway_access import GatewayAccess, GatewayError, deployed_access, url_elsewhere

WRITE = "import json, os; report = lambda **of: open(os.environ['LAMINAR_REPORT'], 'w').write(json.dumps(of)); "


class Claimed:
    """A gateway that hands out `episodes`; each path in `broken` responds with its statuses first.

    The first requests for a path in `unanswered`, so many, get no response before `close`.
    """

    changed: dict[str, Any]

    def __init__(self, *episodes: str) -> None:
        self.episodes, self.broken, self.cut = list(episodes), dict[str, list[int]](), set[str]()
        self.timeout_s, self.changed, self.claimed = 60.0, {}, threading.Event()
        self.received: list[tuple[str, str, Any]] = []
        self.unanswered, self.closing = dict[str, int](), threading.Event()
        self.page = b""
        """What a proxy responds in place of the gateway."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                path, key = self.path.removeprefix("/v1/"), self.headers["authorization"].removeprefix("Bearer ")
                if outer.unanswered.get(path):
                    outer.unanswered[path] -= 1
                    outer.closing.wait()
                    return
                status = 503 if outer.page else next(iter(outer.broken.get(path, ())), 0)
                outer.broken[path] = outer.broken.get(path, [])[1:]
                response: dict[str, Any] = {"error": {"message": "not now"}} if status else {}
                if not status and path == "episodes/claim":
                    status = 200 if outer.episodes else 401  # 401 ends the agents of a test
                    if outer.episodes:
                        name = outer.episodes.pop(0)
                        outer.claimed.set()
                        response = {"episode": name, "attempt": 0, "key": f"k-{name}", "task": {"text": name}}
                        response |= {"timeout_s": outer.timeout_s, "turn_timeout_s": 600.0} | outer.changed
                elif not status:
                    outer.received.append((path, key, body))
                self.send_response(status or 200)
                self.end_headers()
                self.wfile.write(outer.page or json.dumps(response).encode()[: 1 if path in outer.cut else None])
                outer.cut.discard(path)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def gateway() -> Iterator[Claimed]:
    made = Claimed("p0.0", "p1.0")
    yield made
    made.close()


def play(gateway: Claimed, program: str, folder: Path | None = None, **settings: Any) -> list[str]:
    """Play both episodes by `program`; the lines for people."""
    notes: list[str] = []
    options: dict[str, Any] = {"concurrency": 1, "timeout_s": None, "transcripts": folder, "episodes": 2} | settings
    command = (sys.executable, "-c", WRITE + program)
    RemoteAgents(GatewayAccess(gateway.url, "worker"), command, note=notes.append, **options).run()
    return notes


def test_agents_report_with_the_key_of_their_episode(gateway: Claimed, tmp_path: Path) -> None:
    program = "print('working'); report(reward=1.0, answer=json.loads(os.environ['LAMINAR_TASK'])['text'])"
    notes = play(gateway, program, tmp_path / "logs")
    assert gateway.received == [
        ("episode/end", "k-p0.0", {"reward": 1.0, "answer": "p0.0"}),
        ("episode/end", "k-p1.0", {"reward": 1.0, "answer": "p1.0"}),
    ]
    assert (tmp_path / "logs" / "p1.0.log").read_text() == "working\n"
    assert notes[0] == 'p0.0.0: {"reward": 1.0, "answer": "p0.0"}'


@pytest.mark.parametrize(
    ("program", "settings", "error"),
    [
        ("raise SystemExit('no tool')", {}, "exit status 1: no tool"),
        ("report(points=1)", {}, "its report must have reward, rewards and answer only"),
        ("import time; time.sleep(60)", {"timeout_s": 0.5}, "it ran for longer than agents.timeout_s, 0.5 s"),
    ],
)
def test_a_failed_attempt_is_given_back(program: str, settings: dict[str, Any], error: str, gateway: Claimed) -> None:
    play(gateway, program, episodes=1, **settings)
    ((path, key, body),) = gateway.received
    assert (path, key, body["episode"], body["attempt"]) == ("episodes/release", "worker", "p0.0", 0)
    assert error in body["error"]


@pytest.mark.parametrize("statuses", [[400], [413], [408, 408]])
def test_rejected_report_ends_the_episode_with_its_error(
    gateway: Claimed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: list[int]
) -> None:
    """So does one that does not arrive in time, however often it is sent."""
    monkeypatch.setattr("pipelines.run.agents_elsewhere._UNAVAILABLE_S", -1.0)
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.0)
    gateway.broken["episode/end"] = statuses
    play(gateway, "report(rewards={'x': 1})", episodes=1, transcripts=tmp_path)
    reason = "its report was rejected: not now"
    assert gateway.received == [("episode/end", "k-p0.0", {"error": reason})]
    assert (tmp_path / "p0.0.log").read_text() == f"laminar: {reason}\n"


@pytest.mark.parametrize("status", [408, 429, 503, 504])
def test_gateway_that_responds_late_has_not_ended(
    gateway: Claimed, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """It has waited for the owner of the episode; other agents of this process go on."""
    monkeypatch.setattr("pipelines.run.agents_elsewhere._UNAVAILABLE_S", -1.0)
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.0)
    gateway.broken["episode/end"] = [status]
    play(gateway, "report(reward=1)")
    assert [key for _, key, _ in gateway.received] == ["k-p0.0", "k-p1.0"]


def test_request_without_a_response_in_time_is_repeated(gateway: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the response is longer than a gateway that has ended is waited for."""
    monkeypatch.setattr("pipelines.run.agents_elsewhere._UNAVAILABLE_S", 0.5)
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.0)
    post, waits_s = GatewayAccess.post, iter([1.0])

    def posting(access: GatewayAccess, path: str, body: Any, timeout_s: float) -> Any:
        return post(access, path, body, next(waits_s, timeout_s) if path == "episode/end" else timeout_s)

    monkeypatch.setattr(GatewayAccess, "post", posting)
    gateway.unanswered["episode/end"] = 1
    play(gateway, "report(reward=1)")
    assert [key for _, key, _ in gateway.received] == ["k-p0.0", "k-p1.0"]


def test_response_is_waited_for_longer_than_the_gateway_waits(
    gateway: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no client gets the status 504 of a gateway, and a gateway that waits for an owner seems to have ended."""
    waits: dict[str, float] = {}
    post = GatewayAccess.post

    def posting(access: GatewayAccess, path: str, body: Any, timeout_s: float) -> Any:
        waits[path] = timeout_s
        return post(access, path, body, timeout_s)

    monkeypatch.setattr(GatewayAccess, "post", posting)
    gateway.changed["turn_timeout_s"] = 5000.0
    play(gateway, "report(reward=1)", episodes=1)
    assert waits["episodes/claim"] < 600
    assert waits["episode/end"] > 5000


def test_error_of_a_proxy_does_not_show_that_the_gateway_runs(
    gateway: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.run.agents_elsewhere._UNAVAILABLE_S", -1.0)
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.0)
    gateway.page = b"<h1>Service Unavailable</h1>"
    with pytest.raises(GatewayError, match="503"):
        play(gateway, "report(reward=1)")


def test_agents_name_the_address_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.run.agents_elsewhere._UNAVAILABLE_S", 0.0)
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.01)
    notes: list[str] = []
    access = GatewayAccess("http://127.0.0.1:1/v1", "worker")
    with pytest.raises(GatewayError, match=r"http://127\.0\.0\.1:1/v1 does not respond: .*\(gateway\.advertise\)"):
        RemoteAgents(access, ("true",), 2, None, None, None, notes.append).run()
    (note,) = notes
    assert note.endswith("(gateway.advertise)? It is tried for 0 s")


def test_an_attempt_takes_no_longer_than_the_run_allows(gateway: Claimed) -> None:
    gateway.timeout_s = 0.5
    play(gateway, "import time; time.sleep(60)", episodes=1, timeout_s=50.0)
    assert "agents.timeout_s, 0.5 s" in gateway.received[0][2]["error"]


def test_agents_that_are_stopped_give_back_without_an_error(gateway: Claimed) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    agents = RemoteAgents(GatewayAccess(gateway.url, "worker"), command, 1, None, None, 1, lambda line: None)
    thread = threading.Thread(target=agents.run)
    thread.start()
    gateway.claimed.wait()
    agents.stop.set()
    thread.join()
    assert gateway.received == [("episodes/release", "worker", {"episode": "p0.0", "attempt": 0, "error": None})]


@pytest.mark.parametrize("changed", [{"episode": "../x"}, {"task": None}, {"attempt": "x"}])
def test_an_invalid_claim_ends_the_agents(changed: dict[str, Any], gateway: Claimed) -> None:
    gateway.changed = changed
    with pytest.raises(GatewayError, match="the gateway hands out"):
        play(gateway, "report(reward=0)")


def test_requests_are_repeated_while_the_gateway_is_away(gateway: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.01)
    gateway.broken = {"episodes/claim": [503], "episode/end": [503]}
    play(gateway, "report(reward=0)", episodes=1)
    assert [path for path, _, _ in gateway.received] == ["episode/end"]


def test_a_request_is_repeated_if_its_response_is_cut(gateway: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.run.agents_elsewhere.RETRY_S", 0.01)
    gateway.cut = {"episodes/claim"}
    play(gateway, "report(reward=0)", episodes=1)
    assert [key for _, key, _ in gateway.received] == ["k-p1.0"], "the claim of p0.0 expires"


def test_an_episode_that_has_ended_meanwhile_is_left(gateway: Claimed) -> None:
    gateway.broken = {"episode/end": [409]}
    notes = play(gateway, "report(reward=0)")
    assert "not now" in notes[0]
    assert [key for _, key, _ in gateway.received] == ["k-p1.0"]


def test_a_rejected_key_ends_the_agents(gateway: Claimed) -> None:
    with pytest.raises(GatewayError):
        play(gateway, "report(reward=0)", episodes=None)
    assert len(gateway.received) == 2


@pytest.mark.parametrize("url", ["file:///etc", "gateway.example/v1"])
def test_an_address_that_is_none_is_rejected(url: str) -> None:
    with pytest.raises(GatewayError, match="must begin with http"), GatewayAccess(url, "k").post("x", {}):
        pass


def test_agents_serve_refuses_a_configuration_not_deployed(tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match="LAMINAR_GATEWAY_URL is not set: use --config in a container of the gat"):
        deployed_access(tmp_path / "run.toml", WORKERS)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "gpu1.example"])
def test_agents_serve_prints_an_address_for_other_machines(host: str) -> None:
    name = host if host == "gpu1.example" else machine_name()
    assert url_elsewhere(f"https://{host}:8443/v1") == f"https://{name}:8443/v1"


def test_agents_serve_prints_a_command_that_works_here() -> None:
    text = _served_text({"url": "http://h/v1", "worker_key": "w", "people_key": "p"})
    assert (
        text.splitlines()[-1] == f"{KEY_VARIABLE}=w {laminar_command()} agents play http://h/v1 -- python my_agent.py"
    )
