"""The agents of the examples, with a client whose responses are given; programs run in the real sandbox."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
REPOSITORIES = [json.loads(line) for line in (EXAMPLES / "data" / "repositories.jsonl").read_text().splitlines()]
PROGRAM = "import stats; print(stats.mean([4]))"
REPAIRED = "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0\n"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "agents" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Client:
    """Responds with `contents`, each a text or a list of calls; keeps the messages of the requests."""

    def __init__(self, *contents: Any) -> None:
        self.contents, self.requests = list(contents), []
        self.chat = SimpleNamespace(completions=self)

    def create(self, messages: list[Any], **options: Any) -> Any:
        self.requests.append(list(messages))
        content = self.contents.pop(0)
        calls = [] if isinstance(content, str) else content
        functions = [SimpleNamespace(name=name, arguments=json.dumps(given)) for name, given in calls]
        made = [SimpleNamespace(id=f"c{at}", function=each) for at, each in enumerate(functions)]
        text = content if isinstance(content, str) else None
        message = SimpleNamespace(content=text, tool_calls=made or None, model_dump=lambda **_: {"role": "assistant"})
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def test_repair_agent_is_rewarded_once_the_tests_pass() -> None:
    repair = load("repair_agent")
    task = {"text": REPOSITORIES[0]["question"], "reference": REPOSITORIES[0]}
    client = Client(
        [("list_files", {}), ("read_file", {"path": "stats.py"}), ("run_tests", {})],
        [
            ("write_file", {"path": "stats.py", "text": REPAIRED}),
            ("run", {"program": PROGRAM}),
        ],
        [("run_tests", {}), ("write_file", {"path": "../x", "text": ""}), ("fly", {})],
        "DONE",
    )
    assert repair.solve(client, task)["reward"] == 1.0
    results = [each["content"] for each in client.requests[-1] if each["role"] == "tool"]
    assert results[0] == "stats.py\ntest_stats.py"
    assert "return sum(numbers) / len(numbers)" in results[1]
    assert "ZeroDivisionError" in results[2]
    assert results[3:] == [
        *("written", "4.0\n", "all tests passed\n", "the path must be within the repository", "there is no tool fly"),
    ]


@pytest.mark.parametrize(
    "text",
    ["print('all tests passed')\nraise SystemExit", "import sys\nsys.exit()", "def mean(some):\n    return 1\n"],
)
def test_repair_agent_gives_no_reward_for_tests_that_did_not_run(text: str) -> None:
    repair = load("repair_agent")
    repository = repair.Repository(REPOSITORIES[0]["files"], REPOSITORIES[0]["tests"])
    repository.call("write_file", {"path": "stats.py", "text": text})
    repository.call("write_file", {"path": "test_stats.py", "text": ""})
    assert not repository.run_tests()[0]


@pytest.mark.parametrize("row", REPOSITORIES, ids=lambda row: next(iter(row["tests"])))
def test_every_example_repository_fails_its_tests(row: dict[str, Any]) -> None:
    assert not load("repair_agent").Repository(row["files"], row["tests"]).run_tests()[0]


def test_calculator_agent_gets_results_and_reports_its_answer() -> None:
    client = Client("<calc>4 + 5", "<calc>none", "so #9")
    report = load("calculator_agent").solve(client, {"text": "4 + 5 =", "reference": {"answer": 9}})
    assert report == {"answer": "so #9", "reward": 1.0}
    said = [each["content"] for each in client.requests[-1] if each["role"] == "user"]
    assert said == ["4 + 5 =", "<result>9</result>", "<error>not a sum</error>"]


@pytest.mark.parametrize(
    ("answers", "reward"), [(["#9", "#15"], 1.0), (["#8", "#14"], 0.5), (["#8", "#15"], 0.0), (["none"], 0.0)]
)
def test_team_of_two_is_rewarded_for_each_right_sum(answers: list[str], reward: float) -> None:
    client = Client(*answers)
    report = load("team_of_two").solve(client, {"text": "4 + 5 + 6"})
    assert report["reward"] == reward
    assert client.requests[0] == [{"role": "user", "content": "4+5="}]
    if len(client.requests) > 1:
        assert client.requests[1] == [{"role": "user", "content": f"{answers[0][1:]}+6="}], "a conversation of its own"
