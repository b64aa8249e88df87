"""The examples of docs/hooks.md work as they stand: each file is written, configured as shown, and used once."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hooks_document import FILES, TEXT, with_functions, with_programs, write_files

from operators.agents.agent_process import REPORT_FILE, attempt, environment_of, read_report, start_command
from operators.agents.function_server import load_function, report_of
from operators.autoscaler.actuators import ActuatorFailed, Command
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import make_policy
from operators.experience.batch_context import BatchContext
from operators.experience.curriculum import Curriculum, Success
from operators.experience.evictions import Drop, Eviction
from operators.experience.groups import Group
from operators.experience.members import GroupMember
from operators.experience.samplers import Sampler
from operators.experience.writers import Writer
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.contract import LiveEpisode, load_environment
from operators.score.attempt import Attempt
from operators.score.rewards import make_judge
from pipelines.config import Config, parse_config
from pipelines.run.paths import files_read, with_absolute_paths
from schemas.records import ScalingDecision


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the document's files."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def config(folder: Path) -> Config:
    """The document's configuration, read in the folder with its files."""
    return with_absolute_paths(parse_config(with_functions(), "hooks.md"))


@pytest.fixture
def programs(folder: Path) -> Config:
    """The same with the curriculum, the agent's command and the actuator."""
    return with_absolute_paths(parse_config(with_programs(folder), "hooks.md"))


def test_hooks_document_uses_all_its_files(config: Config, programs: Config, folder: Path) -> None:
    read = {path for each in (config, programs) for _, path in files_read(each) if path.is_relative_to(folder)}
    assert read == {folder / name for name in FILES} - {folder / "my_program.py"}
    assert programs.agents is not None
    assert programs.agents.command == ("python", "my_program.py")
    assert len(FILES) == 7


def public(kind: type) -> set[str]:
    """The fields, properties and methods that a user of `kind` sees."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    named = {name for name in vars(kind) if not name.startswith("_")} | set(getattr(kind, "_fields", ()))
    return fields | named


@pytest.mark.parametrize(
    ("kind", "internal"),
    [
        (Sampler, set()),
        (Writer, set()),
        (Eviction, set()),
        (Group, {"completed", "close"}),
        (GroupMember, {"block", "row", "key"}),
        (BatchContext, set()),
        (Success, {"plus"}),
    ],
)
def test_hooks_document_names_every_field(kind: type, internal: set[str]) -> None:
    named = {name for name in public(kind) if f"| `{kind.__name__}.{name}" in TEXT}
    assert public(kind) - named == internal


def test_hooks_document_has_the_fields_of_an_observation() -> None:
    rows = TEXT.partition("| field of `Observation` |")[2].partition("```")[0]
    assert [field.name for field in dataclasses.fields(Observation) if f"`{field.name}`" not in rows] == []
    assert list(inspect.signature(Drop).parameters) == ["member", "reason"]


def test_reward_of_the_document_is_called(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # paths are absolute
    (spec,) = config.score.rewards
    judge = make_judge(spec.name, spec.options)
    values = [judge(Attempt("", answer, 1, "", "gcd", {"answer": "4"})) for answer in ("4.4", "5", "four", None)]
    assert values == [1.0, 0.0, 0.0, 0.0]


def test_environment_of_the_document_needs_no_section(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config.prompts.environment == "Countdown"
    (spec,) = config.rollout.environments
    episode = LiveEpisode(load_environment(spec.target, spec.options), {"text": "?"}, spec.max_observation_chars)
    for _ in range(3):
        episode.step("turn\n")
    assert episode.state.rewards == [0.0, 0.0, 1.0]
    assert episode.state.done


def test_agent_of_the_document_is_called(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config.agents is not None
    asked: dict[str, Any] = {}

    def create(**request: Any) -> Any:
        asked.update(request)
        return SimpleNamespace(id="r1", choices=[SimpleNamespace(message=SimpleNamespace(content="It is 4."))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = {"text": "2 + 2?", "reference": {"answer": 4}}
    returned = load_function(config.agents.function)(client, task)
    assert report_of(returned) == {"answer": "It is 4.", "reward": 1.0, "rewards": {"r1": 1.0}}
    assert asked["messages"] == [{"role": "user", "content": "2 + 2?"}]


class Completions(BaseHTTPRequestHandler):
    """A gateway that answers each request with the key and the path of the request."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = f"{self.path} {self.headers['authorization']} {request['messages'][0]['content']} 4"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        kind = {"id": "r1", "object": "chat.completion", "created": 0, "model": "laminar"}
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**kind, "choices": [choice]}).encode())

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def test_agent_command_of_the_document_reports(programs: Config, folder: Path) -> None:
    assert programs.agents is not None
    transcript = folder / "transcript.log"
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        task = {"text": "2 + 2?", "reference": {"answer": 4}}
        environment = environment_of(f"http://127.0.0.1:{server.server_port}/v1", "lm-key", task, folder)
        start = start_command((sys.executable, *programs.agents.command[1:]), environment, transcript)
        assert attempt(start, transcript, 120, threading.Event()) == ""
        server.shutdown()
    assert read_report(folder / REPORT_FILE) == {"answer": "/v1/chat/completions Bearer lm-key 2 + 2? 4", "reward": 1.0}


def test_buffer_classes_of_the_document_are_made(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    made = (config.experience.make_sampler(), *config.experience.make_writers(), *config.experience.make_evictions())
    assert [type(each).__name__ for each in made] == ["ShortestFirst", "Short", "Easy"]
    sampler, writer, eviction = made
    groups = [SimpleNamespace(tokens=tokens, rewards=[0.5, 1.0], members=["m"]) for tokens in (900, 5000, 40)]
    assert [group.tokens for group in sampler.order(groups, None)] == [40, 900]
    assert [writer.refuse(SimpleNamespace(tokens=tokens)) for tokens in (512, 513)] == [None, "513 tokens"]
    assert eviction.evict(groups, None) == []
    assert eviction.evict([SimpleNamespace(rewards=[1.0], members=["m"])], None) == [Drop("m", "easy")]


def test_curriculum_of_the_document_changes_its_level(programs: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    sampler = programs.experience.make_sampler()
    assert [sampler.refuse(SimpleNamespace(rewards=rewards)) is None for rewards in ([0.0, 1.0], [1.0, 1.0])] == [
        True,
        False,
    ]
    asked = []
    for level, right in ((0, 1.0), (0, 0.0), (1, 0.0), (1, 0.5)):
        curriculum = Curriculum("", 3, [level, 0, False, {}], sampler.success_window)
        for count in (127, 1):
            for _ in range(count):
                curriculum.count(0, "chain_sum", right)
            context = BatchContext(0, 64, 1, 0, None, 0.0, 0, curriculum.level, curriculum.all_shards())
            request = curriculum.request(sampler.level_request(context), 0, 0)
            asked.append(None if request is None else request.level)
    assert asked == [None, 1, None, None, None, 0, None, None]


def test_actuator_of_the_document_scales(
    programs: Config, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert programs.autoscaling is not None
    kubectl = folder / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=":")
    actuator = Command("first", programs.autoscaling.command)
    decision = ScalingDecision(7, "queue", 2, 2, 5, "2.00 requests a slot", False, 0)
    actuator.apply(decision, ("h1", "h2"), 30)
    asked = "--namespace laminar scale statefulset laminar-first-rollout --replicas 5\n"
    assert (folder / "asked").read_text() == asked
    kubectl.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ActuatorFailed, match="exited with code 3"):
        actuator.apply(decision, ("h1", "h2"), 30)


def test_policy_of_the_document_decides(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config.autoscaling is not None
    policy = make_policy(config.autoscaling)
    requests = [policy.request(Observation(0.0, 1, time_of_day=hour * 3600)) for hour in (3, 12)]
    assert [(each.kind, each.processes) for each in requests if each] == [("exactly", 4), ("exactly", 1)]


def test_named_environments_are_added_once_for_all_tasks() -> None:
    tasks = [
        {"task": "gcd", "environment": "my:First"},
        {"task": "lcm", "environment": "my:First"},
        {"task": "chain_sum", "environment": "other.py:Second"},
        {"task": "countdown", "environment": ""},
        {"task": "leg_counting", "environment": "guess"},
    ]
    known = [{"name": "other.py:Second", "label": "mine", "turns": 3}]
    config = parse_config({"prompts": {"tasks": tasks}, "rollout": {"environments": known}}, "test")
    assert config.rollout.environments == (
        EnvironmentSpec("other.py:Second", label="mine", turns=3),
        EnvironmentSpec("my:First"),
        EnvironmentSpec("guess"),
    )
    assert [task.environment for task in config.prompts.mixture] == ["First", "First", "mine", "", "guess"]
