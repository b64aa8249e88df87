"""Environments in their processes: whatever one does costs one episode, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from operators.rollout.environments.calculator import Calculator, compute
from operators.rollout.environments.config import ENVIRONMENTS, EnvironmentSpec
from operators.rollout.environments.contract import EpisodeState, LiveEpisode, load_environment
from operators.rollout.environments.guess import Guess
from operators.rollout.environments.pool import EnvironmentFailed, EnvironmentPool, EnvironmentUnavailable
from operators.rollout.environments.python_tool import PythonTool

HERE = Path(__file__).with_name("fake_environments.py")
PROMPT = {"text": "3 * 4 =", "task": "sums", "number": 7, "reference": {"answer": "12"}}

OpenPool = Callable[..., EnvironmentPool]


@pytest.fixture(scope="module")
def open_pool() -> Iterator[OpenPool]:
    pools: list[EnvironmentPool] = []

    def opened(kind: str, **fields: Any) -> EnvironmentPool:
        pools.append(EnvironmentPool(EnvironmentSpec(f"{HERE}:{kind}", **({"workers": 1} | fields))))
        return pools[-1]

    yield opened
    for pool in pools:
        pool.close()


def play(pool: EnvironmentPool, name: str, *texts: str, last: bool = False) -> EpisodeState:
    return pool.play(name, PROMPT, texts, last=last).result(timeout=60)


def test_an_episode_is_played_on_or_again_to_the_same_end(open_pool: OpenPool) -> None:
    pool = open_pool("Echo", workers=2)
    assert play(pool, "p0.0") == EpisodeState(["[7]"], [], False)
    assert play(pool, "p0.0", "a") == EpisodeState(["[7]", "(1:97)"], [0.25], False)
    on = play(pool, "p0.0", "a", "bb", "c")
    assert on == EpisodeState(["[7]", "(1:97)", "(2:293)", "(3:392)"], [0.25, 0.5, 0.75], True)
    assert play(pool, "p0.1", "a", "bb", "c") == on
    assert play(pool, "p0.0", "b") == EpisodeState(["[7]", "(1:98)"], [0.25], False)  # another past
    assert play(pool, "p0.0", "b") == EpisodeState(["[7]", "(1:98)"], [0.25], False)  # asked twice, told once


def test_what_is_independent_is_not_played_again(open_pool: OpenPool) -> None:
    pool = open_pool("Independent")
    assert play(pool, "a", "x", "y").observations == ["", None, "(y:1)"]
    assert play(pool, "a", "x", "y", "end") == EpisodeState(["", None, "(y:1)", "(end:2)"], [0.0, 0.0, 1.0], True)


BAD = [
    ("raises", "KeyError: 'no such thing' (fake_environments.py:"),
    ("exits", "SystemExit: 0"),
    ("says 100 MB", "ValueError: an observation of 100000000 letters is longer than 16384"),
    ("eats memory", "MemoryError"),
    ("starts a process", "PermissionError"),
    ("returns too little", "TypeError: step must return observation, reward, done and info, not tuple"),
    ("returns no text", "TypeError: an observation must be text, not bytes"),
    ("returns half a letter", "UnicodeEncodeError"),
    ("rewards with text", "TypeError: a reward must be a number, not str"),
    ("rewards with NaN", "ValueError: a reward must be finite, not nan"),
    ("is done by 1", "TypeError: done must be a bool and info a mapping, not int, dict"),
    ("informs in a list", "TypeError: done must be a bool and info a mapping, not bool, list"),
    ("raises at reset", "RuntimeError: no game today"),
    ("resets to nothing", "TypeError: an observation must be text, not NoneType"),
    ("hangs", "the environment took longer than 0.3 s a step"),
    ("spins", "the environment took longer than 0.3 s a step"),
    ("kills itself", "the environment's process died of SIGKILL"),
]


@pytest.mark.parametrize(("how", "why"), BAD, ids=[how for how, _ in BAD])
def test_a_bad_environment_fails_its_episode(how: str, why: str) -> None:
    spec = EnvironmentSpec(
        f"{HERE}:Bad", options={"how": how}, workers=1, seconds=0.3 if why.endswith("a step") else 30.0
    )
    pool = EnvironmentPool(spec)
    try:
        for name in ("a", "b"):  # and the next one finds a process again
            with pytest.raises(EnvironmentFailed) as failed:
                play(pool, name, "text")
            assert why in str(failed.value)
    finally:
        pool.close()


def test_an_episode_survives_the_process_that_had_it(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool("DiesOnce")
    prompt = PROMPT | {"reference": {"file": str(tmp_path / "died")}}
    assert pool.play("a", prompt, ("x",), last=False).result(timeout=60).rewards == [0.25]
    assert pool.play("a", prompt, ("x", "y"), last=False).result(timeout=60).rewards == [0.25, 0.5]
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Missing", "has no class 'Missing'"),
        ("NoSteps", "has no method 'step'"),
        ("ListensToAString", "stop must be strings"),
        ("Bad", "missing 1 required positional argument: 'how'"),
    ],
)
def test_what_is_no_environment_is_said_at_once(kind: str, why: str) -> None:
    with pytest.raises(EnvironmentUnavailable, match=why):
        EnvironmentPool(EnvironmentSpec(f"{HERE}:{kind}", workers=1))


def test_a_pool_that_is_closed_waits_for_nobody() -> None:
    pool = EnvironmentPool(EnvironmentSpec(f"{HERE}:Bad", options={"how": "hangs"}, workers=1, seconds=1000.0))
    under_way, waiting = pool.play("a", PROMPT, ("x",), last=False), pool.play("b", PROMPT, ("x",), last=False)
    while not under_way.running():
        pass
    pool.close()
    with pytest.raises(EnvironmentFailed, match="closed"):
        under_way.result(timeout=0)
    assert waiting.cancelled()


def test_specs_name_what_was_meant() -> None:
    assert EnvironmentSpec("calculator").resolved_name == "calculator"
    assert EnvironmentSpec("my.module:Game").resolved_name == "Game"
    for fields, why in (
        ({"name": "calculater"}, "did you mean 'calculator'"),
        ({"name": "module:"}, "'module:Class'"),
        ({"name": "guess", "turns": 0}, "turns of 'guess' must be at least 1"),
        ({"name": "guess", "seconds": 0.0}, "seconds of 'guess' must be positive"),
    ):
        with pytest.raises(ValueError, match=why):
            EnvironmentSpec(**fields)  # type: ignore[arg-type]


# --- those that come along


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*7", "84"), (" -(3 - 10) ", "7"), ("7/2", "3.5"), ("1/3", "0.333333333333"), ("2**10 % 7", "2"), ("7//2", "3"),
     ("0.1+0.2", "0.3")],
)  # fmt: skip
def test_expressions_are_computed(expression: str, value: str) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/0",
        "1+",
        "x",
        "f(1)",
        "2**2**9",
        "9**64",
        "'a'*3",
        "True",
        "1" * 201,
        "(" * 150,
        "[1]",
        "1 if 1 else 2",
        "1e999",
    ],
)
def test_what_is_no_expression_is_said(expression: str) -> None:
    calculator = Calculator()
    calculator.reset(PROMPT)
    observation, reward, done, _ = calculator.step(f"<calc>{expression}</calc>")
    assert observation.startswith("<error>")
    assert len(observation) < 120
    assert (reward, done) == (0.0, False)


def test_a_calculator_answers_calls_and_judges_the_answer() -> None:
    calculator = Calculator()
    assert calculator.reset(PROMPT) == ""
    assert calculator.step("so <calc>3*4</calc>")[:3] == ("<result>12</result>", 0.0, False)
    assert calculator.step("so </calc>")[2] is False
    assert [calculator.step(text)[1:3] for text in ("so #12", "#12.0", "12", "#13", "")] == [
        (1.0, True), (1.0, True), (1.0, True), (0.0, True), (0.0, True)
    ]  # fmt: skip


def test_a_game_is_played_to_its_end() -> None:
    game = Guess(most=8, nearer=0.1)
    assert "from 1 to 8" in game.reset(PROMPT)
    assert game.step("what?")[1:3] == (0.0, False)
    low, high, earned = 1, 8, []
    for _ in range(4):
        guess = (low + high) // 2
        said, reward, done, _ = game.step(f"I say {guess}")
        earned.append(reward)
        if done:
            break
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    assert done
    assert earned[-1] == 1.0
    assert earned[0] in (0.1, 1.0)


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("<python>print(12 * 7)</python>", "<output>84</output>"),
        ("<python>1/0</python>", "ZeroDivisionError: division by zero</error>"),
        ("<python>while True: pass</python>", "<error>it took longer than 1 s</error>"),
        ("<python>while True: print('x' * 1000)</python>", "<error>it wrote more than 65536 letters</error>"),
        ("<python>open('/etc/passwd')</python>", "'/etc/passwd'</error>"),
    ],
)
def test_python_tool_runs_programs_in_the_sandbox(text: str, observation: str) -> None:
    tool = LiveEpisode(load_environment(ENVIRONMENTS["python"], {"seconds": 1.0}), PROMPT, 16_384)
    tool.step(text)
    assert (tool.state.observations[1] or "").endswith(observation)
    assert not tool.state.done


def test_a_program_that_is_not_called_is_the_answer() -> None:
    tool = PythonTool()
    tool.reset(PROMPT)
    assert tool.step("#12")[:3] == ("", 1.0, True)
