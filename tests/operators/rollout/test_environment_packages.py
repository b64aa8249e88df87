"""The adapters for environment packages, tested with the packages: `make environments-test`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.contract import EpisodeState
from operators.rollout.environments.pool import EnvironmentFailed, EnvironmentPool
from operators.rollout.environments.verifiers_rollout import tool_calls

GAME = """
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "Guess.", "answer": "7"}])

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0

    @vf.stop
    async def found(self, state):
        return state.get("won", False)

    async def env_response(self, messages, state, **others):
        state["tries"] += 1
        guess = messages[-1].content
        if "boom" in guess:
            raise vf.Error("no such game")
        if guess == state["answer"]:
            state["won"] = True
        return [{"role": "user", "content": f"Try {state['tries']}: {guess} is wrong."}]

def right(completion, answer, **others):
    return float(any(message.content == answer for message in completion if message.role == "assistant"))

def short(completion, **others):
    return 1.0 / len(completion)

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

def load_environment(kind="guess", max_turns=3):
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.1])
    if kind == "tools":
        return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=rubric, max_turns=max_turns)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
    return Guess(dataset=ROWS, rubric=rubric, max_turns=max_turns)
"""

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
from openenv.core.env_server.types import State

class EchoAction(Action):
    text: str
    loud: bool = False

class EchoObservation(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
        self.turns, self.seed = 0, seed
        return EchoObservation(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **others):
        self.turns += 1
        if action.text == "boom":
            raise RuntimeError("no such word")
        text = action.text.upper() if action.loud else action.text
        return EchoObservation(text=f"{self.seed}/{self.turns}: {text}", reward=0.5 * self.turns, done=self.turns == 3)

    @property
    def state(self):
        return State(step_count=self.turns)

app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


def prompt(number: int = 4) -> dict[str, object]:
    return {"text": "Guess.", "task": "guess", "number": number, "reference": {"answer": "7"}}


def play(pool: EnvironmentPool, *texts: str, name: str = "p4.0", last: bool = False) -> EpisodeState:
    return pool.play(name, prompt(), texts, last=last).result(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("openenv")
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(file), str(port)])
    try:
        deadline = time.monotonic() + 120
        while not _listens(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class TestVerifiers:
    @pytest.fixture
    def opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Iterator[EnvironmentPool]:
        pytest.importorskip("verifiers")
        (tmp_path / "laminar_guess.py").write_text(GAME)
        monkeypatch.syspath_prepend(tmp_path)
        options = {"id": "laminar-guess", "args": request.param}
        pool = EnvironmentPool(EnvironmentSpec("verifiers", options=options, memory_mb=16_384, workers=1))
        yield pool
        pool.close()

    @pytest.mark.parametrize("opened", [{}], indirect=True)
    def test_verifiers_rollout_runs_turn_by_turn(self, opened: EnvironmentPool) -> None:
        assert play(opened) == EpisodeState([""], [], False)
        assert play(opened, "3") == EpisodeState(["", "Try 1: 3 is wrong."], [0.0], False)
        ended = play(opened, "3", "7", "never guess")
        assert ended.done
        assert ended.rewards[:-1] == [0.0] * (len(ended.rewards) - 1)

    @pytest.mark.parametrize("opened", [{"max_turns": 2}], indirect=True)
    def test_verifiers_replay_is_identical(self, opened: EnvironmentPool) -> None:
        first = play(opened, "3", "7")
        assert first == play(opened, "3", "7", name="another")
        assert (first.done, first.rewards) == (True, [0.0, pytest.approx(1.0 + 0.1 / 3)])

    @pytest.mark.parametrize("opened", [{"kind": "single"}], indirect=True)
    def test_verifiers_single_turn_is_one_episode(self, opened: EnvironmentPool) -> None:
        assert play(opened, "7").rewards == [pytest.approx(1.1)]

    @pytest.mark.parametrize("opened", [{}], indirect=True)
    def test_verifiers_error_fails_only_its_episode(self, opened: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentFailed, match="the environment failed"):
            play(opened, "boom", "on")
        assert play(opened, "3", name="another").observations[-1] == "Try 1: 3 is wrong."

    @pytest.mark.parametrize("opened", [{"kind": "tools"}], indirect=True)
    def test_verifiers_tools_are_called_from_text(self, opened: EnvironmentPool) -> None:
        call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
        assert play(opened, f"Let me see. {call}").observations[-1] == "7"
        assert play(opened, call, "7").done


class TestOpenEnv:
    @pytest.fixture
    def opened(self, server: str, request: pytest.FixtureRequest) -> Iterator[EnvironmentPool]:
        options = {"url": server, "action": "text", **request.param}
        pool = EnvironmentPool(EnvironmentSpec("openenv", options=options, memory_mb=16_384, workers=1))
        yield pool
        pool.close()

    @pytest.mark.parametrize("opened", [{"observation": "text", "more": {"loud": True}}], indirect=True)
    def test_openenv_turn_is_an_action_of_a_session(self, opened: EnvironmentPool) -> None:
        assert play(opened, "a") == EpisodeState(["seed 4", "4/1: A"], [0.5], False)
        assert play(opened, "b", name="other").observations == ["seed 4", "4/1: B"]
        assert play(opened, "a", "c", "d") == EpisodeState(
            ["seed 4", "4/1: A", "4/2: C", "4/3: D"], [0.5, 1.0, 1.5], True
        )

    @pytest.mark.parametrize("opened", [{}], indirect=True)
    def test_openenv_observes_all_fields_by_default(self, opened: EnvironmentPool) -> None:
        assert json.loads(play(opened, "a").observations[-1] or "")["text"] == "4/1: a"

    @pytest.mark.parametrize("opened", [{"observation": "txt"}], indirect=True)
    def test_openenv_missing_field_fails_the_episode(self, opened: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentFailed, match="has no 'txt'"):
            play(opened, "a")

    @pytest.mark.parametrize("opened", [{"observation": "text"}], indirect=True)
    def test_openenv_server_error_fails_only_its_episode(self, opened: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentFailed):
            play(opened, "boom")
        assert play(opened, "a", name="other").observations[-1] == "4/1: a"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>{"name": "f"}</tool_call>', [{"name": "f", "arguments": "{}"}]),
        ('a<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [{"name": "f", "arguments": '{"x": 1}'}]),
        ("<tool_call>{</tool_call><tool_call>[1]</tool_call><tool_call>{}</tool_call>", []),
    ],
)
def test_tool_calls_are_parsed_from_text(text: str, calls: list[dict[str, str]]) -> None:
    assert tool_calls(text) == calls
