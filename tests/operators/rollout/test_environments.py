"""Environment pools and built-in environments: a faulty environment fails only its episode."""

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


def test_pool_continues_or_replays_an_episode(open_pool: OpenPool) -> None:
    pool = open_pool("Echo", workers=2)
    assert play(pool, "p0.0") == EpisodeState(["[7]"], [], False)
    assert play(pool, "p0.0", "a") == EpisodeState(["[7]", "(1:97)"], [0.25], False)
    on = play(pool, "p0.0", "a", "bb", "c")
    assert on == EpisodeState(["[7]", "(1:97)", "(2:293)", "(3:392)"], [0.25, 0.5, 0.75], True)
    assert play(pool, "p0.1", "a", "bb", "c") == on
    assert play(pool, "p0.0", "b") == EpisodeState(["[7]", "(1:98)"], [0.25], False)  # other turns
    assert play(pool, "p0.0", "b") == EpisodeState(["[7]", "(1:98)"], [0.25], False)  # a repeated request


def test_pool_forgets_episodes_that_have_ended(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.rollout.environments.pool.MAX_LIVE_EPISODES", 2)
    pool = open_pool("Echo")
    assert play(pool, "done", "a", "bb", "c").done
    with pytest.raises(EnvironmentFailed, match="the episode is done after 3 turns"):
        play(pool, "failed", "a", "bb", "c", "d")
    assert not pool._worker_of
    for name in ("first", "second", "third"):
        play(pool, name, "a")
    assert pool._worker_of == {"second": 0, "third": 0}


def test_pool_does_not_replay_independent_steps(open_pool: OpenPool) -> None:
    pool = open_pool("Independent")
    assert play(pool, "a", "x", "y").observations == ["", None, "(y:1)"]
    assert play(pool, "a", "x", "y", "end") == EpisodeState(["", None, "(y:1)", "(end:2)"], [0.0, 0.0, 1.0], True)


FAULTS = [
    ("raises", "KeyError: 'no such thing' (fake_environments.py:"),
    ("exits", "SystemExit: 0"),
    ("returns 100 MB", "ValueError: an observation of 100000000 characters exceeds 16384"),
    ("allocates 1 TB", "MemoryError"),
    ("starts a process", "PermissionError"),
    (
        "returns too little",
        "TypeError: step must return 4 values (observation, reward, done, info), not 2 values (fake_environments.py:",
    ),
    ("returns no text", "TypeError: an observation must be text, not bytes"),
    ("returns an unpaired surrogate", "UnicodeEncodeError"),
    ("rewards with text", "TypeError: a reward must be a number, not str"),
    ("rewards with NaN", "ValueError: a reward must be finite, at most 1e+100, not nan"),
    ("rewards too much", "ValueError: a reward must be finite, at most 1e+100, not 1.7e+308"),
    ("returns done as 1", "TypeError: done must be a bool and info a mapping, not int, dict"),
    ("returns info as a list", "TypeError: done must be a bool and info a mapping, not bool, list"),
    ("raises at reset", "RuntimeError: no game today"),
    ("resets to nothing", "TypeError: an observation must be text, not NoneType"),
    ("hangs", "a step of the environment took longer than 0.3 s"),
    ("loops", "a step of the environment took longer than 0.3 s"),
    ("kills itself", "the environment's process died of SIGKILL"),
]


@pytest.mark.parametrize(("how", "why"), FAULTS, ids=[how for how, _ in FAULTS])
def test_pool_fails_the_episode_of_a_faulty_environment(how: str, why: str) -> None:
    spec = EnvironmentSpec(
        f"{HERE}:Faulty", options={"how": how}, workers=1, seconds=0.3 if why.startswith("a step") else 30.0
    )
    pool = EnvironmentPool(spec)
    try:
        for name in ("a", "b"):  # the second episode gets a new process
            with pytest.raises(EnvironmentFailed) as failed:
                play(pool, name, "text")
            assert why in str(failed.value)
    finally:
        pool.close()


def test_process_that_cannot_be_started_fails_its_episode(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this episode nor the next one may wait for ever."""

    def no_process(*arguments: object) -> None:
        raise OSError("too many open files")

    pool = open_pool("Faulty", options={"how": "kills itself"})
    monkeypatch.setattr("operators.rollout.environments.pool.WorkerProcess", no_process)
    for name in ("a", "b"):
        with pytest.raises(EnvironmentFailed, match="too many open files"):
            play(pool, name, "text")


def test_pool_replays_an_episode_after_its_process_died(open_pool: OpenPool, tmp_path: Path) -> None:
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
        ("StopIsAString", "stop must be non-empty strings"),
        ("Faulty", "missing 1 required positional argument: 'how'"),
    ],
)
def test_pool_rejects_an_invalid_environment_class(kind: str, why: str) -> None:
    with pytest.raises(EnvironmentUnavailable, match=why):
        EnvironmentPool(EnvironmentSpec(f"{HERE}:{kind}", workers=1))


def test_pool_close_does_not_wait_for_episodes() -> None:
    pool = EnvironmentPool(EnvironmentSpec(f"{HERE}:Faulty", options={"how": "hangs"}, workers=1, seconds=1000.0))
    under_way, waiting = pool.play("a", PROMPT, ("x",), last=False), pool.play("b", PROMPT, ("x",), last=False)
    while not under_way.running():
        pass
    pool.close()
    with pytest.raises(EnvironmentFailed, match="closed"):
        under_way.result(timeout=0)
    assert waiting.cancelled()


def test_environment_spec_validates_its_fields() -> None:
    assert EnvironmentSpec("calculator").resolved_name == "calculator"
    assert EnvironmentSpec("my.module:Game").resolved_name == "Game"
    for fields, why in (
        ({"name": "calculater"}, "did you mean 'calculator'"),
        ({"name": "module:"}, "'module:Class'"),
        ({"name": "guess", "turns": 0}, "turns must be at least 1"),
        ({"name": "guess", "seconds": 0.0}, "seconds must be positive"),
        ({"name": "python", "options": {"seconds": 10}}, r"options\.seconds = 10 of python must be below seconds = 10"),
        ({"name": "python", "seconds": 4.0}, r"options\.seconds = 4 of python must be below seconds = 4"),
    ):
        with pytest.raises(ValueError, match=why):
            EnvironmentSpec(**fields)  # type: ignore[arg-type]


# -- built-in environments


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*7", "84"), (" -(3 - 10) ", "7"), ("7/2", "3.5"), ("1/3", "0.333333333333"), ("2**10 % 7", "2"), ("7//2", "3"),
     ("0.1+0.2", "0.3")],
)  # fmt: skip
def test_compute_evaluates_expressions(expression: str, value: str) -> None:
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
def test_calculator_reports_invalid_expressions(expression: str) -> None:
    calculator = Calculator()
    calculator.reset(PROMPT)
    observation, reward, done, _ = calculator.step(f"<calc>{expression}</calc>")
    assert observation.startswith("<error>")
    assert len(observation) < 120
    assert (reward, done) == (0.0, False)


def test_calculator_computes_calls_and_rewards_answers() -> None:
    calculator = Calculator()
    assert calculator.reset(PROMPT) == ""
    assert calculator.step("so <calc>3*4</calc>")[:3] == ("<result>12</result>", 0.0, False)
    assert calculator.step("so </calc>")[2] is False
    assert [calculator.step(text)[1:3] for text in ("so #12", "#12.0", "12", "#13", "")] == [
        (1.0, True), (1.0, True), (1.0, True), (0.0, True), (0.0, True)
    ]  # fmt: skip


def test_guess_rewards_the_correct_number() -> None:
    game = Guess(maximum=8, closer_reward=0.1)
    assert "from 1 to 8" in game.reset(PROMPT)
    assert game.step("what?")[1:3] == (0.0, False)
    low, high, earned = 1, 8, []
    for _ in range(4):
        guess = (low + high) // 2
        observation, reward, done, _ = game.step(f"I say {guess}")
        earned.append(reward)
        if done:
            break
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
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
        ("<python>while True: print('x' * 1000)</python>", "<error>it wrote more than 65536 bytes</error>"),
        ("<python>open('/etc/passwd')</python>", "'/etc/passwd'</error>"),
    ],
)
def test_python_tool_runs_programs_in_the_sandbox(text: str, observation: str) -> None:
    seconds = 1.0 if text.endswith("pass</python>") else 60.0  # the others end, if late on a busy machine
    tool = LiveEpisode(load_environment(ENVIRONMENTS["python"], {"seconds": seconds}), PROMPT, 16_384)
    tool.step(text)
    assert (tool.state.observations[1] or "").endswith(observation)
    assert not tool.state.done


def test_python_tool_rewards_a_turn_without_a_call() -> None:
    tool = PythonTool()
    tool.reset(PROMPT)
    assert tool.step("#12")[:3] == ("", 1.0, True)
