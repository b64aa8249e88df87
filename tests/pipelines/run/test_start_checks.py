"""Checks before the start that need no user code: settings that cannot learn, room on this machine, ports."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from object_store import object_store

from infra.machine import GATEWAY_URL
from infra.sizes import GIB
from infra.storage import open_storage
from infra.store.errors import StoreBusy
from operators.trainer.advantages import generalised, whitened_returns
from operators.trainer.algorithms import FUNCTIONS
from operators.trainer.config import WITH_CRITIC, WITHOUT_GROUPS
from pipelines.config import Config, ConfigProblems, parse_config
from pipelines.roles import Role
from pipelines.run.learnability import doubtful_settings, unlearnable
from pipelines.run.preflight import (
    host_problems,
    missing_requirements,
    model_problems,
    port_problems,
    store_problems,
    unknown_environments,
)
from pipelines.run.run_names import name_problems
from pipelines.run.start_checks import problems_of
from pipelines.run.submission.role_checks import role_problems
from pipelines.run.supervisor import store_in_use


def config_of(**sections: Any) -> Config:
    return parse_config({"run": {"name": "checked"}, **sections}, "test")


@pytest.mark.parametrize(
    ("samples", "algorithm", "refused"),
    [(1, "grpo", True), (1, "rloo", True), (2, "grpo", False), (1, "ppo", False), (1, "reinforce_plus_plus", False)],
)
def test_one_sample_needs_an_advantage_without_groups(samples: int, algorithm: str, refused: bool) -> None:
    config = config_of(
        prompts={"task": "gcd", "samples_per_prompt": samples}, trainer={"learner": {"algorithm": {"name": algorithm}}}
    )
    found = list(unlearnable(config))
    assert len(found) == refused
    assert all(f"samples_per_prompt = 1, task 'gcd': the advantage of {algorithm}" in each for each in found)


WINDOWED, CAPACITY = {"name": "windowed", "options": {"window": 4}}, {"name": "capacity"}


@pytest.mark.parametrize(
    ("experience", "refused"),
    [
        ({"sampler": WINDOWED}, "takes no others than the oldest 4 groups, of samples_per_prompt = 8"),
        ({"sampler": WINDOWED, "global_batch": 32}, ""),
        ({"sampler": WINDOWED, "max_shards": 2}, ""),  # each shard proposes the groups of its next windows, too
        ({"sampler": {"name": "windowed"}, "global_batch": 2049}, "Set a window above 257"),
        ({"sampler": {"name": "dynamic", "options": {"order_by": "windowed"}}, "global_batch": 2049}, "order_by, or"),
        ({"sampler": {"name": "windowed"}, "global_batch": 2048}, ""),
        ({"evictions": [CAPACITY | {"options": {"trajectories": 127}}]}, "'capacity' lets 127 trajectories be held"),
        ({"evictions": [CAPACITY | {"options": {"trajectories": 64}}], "shards": 2}, ""),
        ({"evictions": [CAPACITY]}, ""),
    ],
)
def test_buffer_that_never_fills_a_batch_is_refused(experience: dict[str, Any], refused: str) -> None:
    found = list(unlearnable(config_of(prompts={"task": "gcd"}, experience=experience, kafka={"partitions": 2})))
    assert len(found) == bool(refused)
    assert all(refused in each for each in found)


@pytest.mark.parametrize(("samples", "refused"), [(1, 1), (2, 0)])
def test_dynamic_sampling_of_single_answers_is_refused(samples: int, refused: int) -> None:
    prompts = {"task": "gcd", "samples_per_prompt": samples}
    trainer = {"learner": {"algorithm": {"name": "ppo"}}}
    found = list(unlearnable(config_of(prompts=prompts, trainer=trainer, experience={"sampler": {"name": "dynamic"}})))
    assert len(found) == refused
    assert all("experience.sampler = 'dynamic' refuses groups" in each for each in found)


@pytest.mark.parametrize(("sampler", "doubtful"), [("fifo", 1), ("curriculum", 0), ("own.py:Sampler", 0)])
def test_levels_that_no_sampler_requests_are_doubtful(sampler: str, doubtful: int) -> None:
    prompts = {"task": "gcd", "levels": [{}, {}]}
    config = config_of(prompts=prompts, experience={"sampler": {"name": sampler}})
    found = [text for text in doubtful_settings(config) if text.startswith("prompts.levels")]
    assert len(found) == doubtful


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_learning_rate_of_0_needs_an_explicit_setting(algorithm: str) -> None:
    learner = {"learning_rate": 0.0, "algorithm": {"name": algorithm}}
    (problem,) = unlearnable(config_of(prompts={"task": "gcd"}, trainer={"learner": learner}))
    assert problem.startswith("trainer.learner.learning_rate = 0: the model would not change.")
    assert "run.allow_no_learning = true" in problem
    accepted = config_of(
        run={"name": "checked", "allow_no_learning": True},
        prompts={"task": "gcd", "samples_per_prompt": 1},
        trainer={"learner": learner},
    )
    assert list(unlearnable(accepted)) == []


@pytest.mark.parametrize(("total", "final", "refused"), [(12, 0.0, True), (12, 1e-7, False), (16, 0.0, False)])
def test_schedule_that_ends_at_0_before_the_goal_is_refused(total: int, final: float, refused: bool) -> None:
    learner = {"schedule": "cosine", "total_steps": total, "final_learning_rate": final}
    found = list(unlearnable(config_of(prompts={"task": "gcd"}, trainer={"optimizer_steps": 16, "learner": learner})))
    assert len(found) == refused
    assert all("total_steps = 12: the schedule ends at a learning rate of 0 before the 16" in each for each in found)


@pytest.mark.parametrize(
    ("name", "warmup", "steps", "refused"),
    [
        ("ppo", 80, 80, "critic.warmup_batches = 80: all 80 steps of trainer.optimizer_steps would train the critic"),
        ("ppo", 79, 80, None),
        ("tis", 80, 80, None),  # it has no critic
        ("ppo", 20, 120, None),  # the policy's schedule begins after the critic's warm-up
        ("ppo", 19, 120, "total_steps = 100: the schedule ends at a learning rate of 0 before the 101 steps"),
    ],
)
def test_warmup_of_the_critic_counts_in_the_schedule(name: str, warmup: int, steps: int, refused: str | None) -> None:
    learner = {"algorithm": {"name": name}, "critic": {"warmup_batches": warmup}}
    if steps == 120:
        learner |= {"schedule": "cosine", "total_steps": 100}  # type: ignore[dict-item]
    trainer = {"optimizer_steps": steps, "learner": learner}
    found = list(unlearnable(config_of(prompts={"task": "gcd"}, trainer=trainer)))
    assert len(found) == (refused is not None)
    assert all(f"trainer.learner.{refused}" in each for each in found)


def test_algorithm_that_no_batch_can_be_trained_with_is_refused() -> None:
    run = {"name": "checked", "allow_no_learning": True}
    config = config_of(run=run, prompts={"task": "gcd"}, trainer={"learner": {"algorithm": {"name": "dr_grpo"}}})
    (problem,) = unlearnable(config)
    assert problem.startswith("trainer.learner.algorithm.max_response_tokens must be set")


@pytest.mark.parametrize(("rate", "megabytes", "doubtful"), [(1e-6, 4, 1), (1e-6, 400, 0), (2e-4, 4, 0)])
def test_rate_of_a_large_model_for_a_small_one_is_doubtful(
    tmp_path: Path, rate: float, megabytes: int, doubtful: int
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(megabytes * 10**6)  # only its size is read
    learner = {"learning_rate": rate}
    config = config_of(prompts={"task": "gcd"}, model={"path": str(tmp_path)}, trainer={"learner": learner})
    found = [text for text in doubtful_settings(config) if "learning_rate" in text]
    assert len(found) == doubtful
    assert all("one of 1.0 million hardly changes" in text for text in found)


def test_path_that_the_system_refuses_is_a_problem_of_its_key() -> None:
    refused = f"/{'x' * 300}"  # as below a folder that this user may not read; root may read all
    config = config_of(
        run={"name": "checked", "folder": refused},
        model={"path": refused},
        prompts={"source": "jsonl", "path": f"{refused}/rows.jsonl"},
        relay={"store": refused},
        gateway={"template": "chat"},
        trainer={"learner": {"learning_rate": 0.0}},
    )
    found = [*name_problems(config), *missing_requirements(config)]
    assert {each.split()[0] for each in found} == {
        "model.path:",
        "prompts.path:",
        "run.folder:",
        "trainer.learner.learning_rate",
    }
    assert f"prompts.path: {refused}/rows.jsonl cannot be read (File name too long)" in found


def test_warm_start_beside_a_model_is_doubtful(tmp_path: Path) -> None:
    run = {"name": "checked", "folder": str(tmp_path)}
    config = config_of(run=run, prompts={"task": "gcd"}, warm_start={}, trainer={"learner": {"learning_rate": 2e-4}})
    named = replace(config, model=replace(config.model, path=str(tmp_path / "my-model")))
    resumed = replace(config, model=replace(config.model, path=str(tmp_path / "warm-starts" / "abc")))
    found = [[text for text in doubtful_settings(each) if "warm_start" in text] for each in (config, named, resumed)]
    assert [len(each) for each in found] == [0, 1, 0]
    assert found[1][0].startswith("[warm_start] has no effect beside model.path")


@pytest.mark.parametrize(("notice_s", "doubtful"), [(0.0, 1), (60.0, 0)])
def test_autoscaling_without_a_notice_is_doubtful(notice_s: float, doubtful: int) -> None:
    config = config_of(prompts={"task": "gcd"}, autoscaling={}, rollout={"termination_notice_s": notice_s})
    found = [text for text in doubtful_settings(config) if text.startswith("rollout.termination_notice_s = 0")]
    assert len(found) == doubtful


def test_algorithms_without_groups_are_those_of_their_advantages() -> None:
    alone = {name for name, each in FUNCTIONS.items() if each.advantage in (generalised, whitened_returns)}
    assert alone == WITHOUT_GROUPS
    assert {name for name, each in FUNCTIONS.items() if each.critic} == WITH_CRITIC


def test_environments_that_prompts_name_must_exist() -> None:
    tasks = [{"task": "gcd", "environment": name} for name in ("gess", "guess")]
    tasks = [{**task, "name": task["environment"]} for task in tasks]
    config = config_of(rollout={"environments": [{"name": "guess"}]}, prompts={"tasks": tasks})
    (problem,) = unknown_environments(config)
    assert (
        problem == "prompts.environment: there is no environment 'gess' in rollout.environments; did you mean 'guess'?"
    )
    assert problem in list(missing_requirements(config))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": '{"chat_template": ""}'}, False),
        ({"tokenizer_config.json": "[]"}, False),
        ({"chat_template.jinja": "{{ messages }}"}, True),
        ({"chat_template.jinja": "", "tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
    ],
)
def test_gateway_with_a_chat_template_needs_one(files: dict[str, str], found: bool, tmp_path: Path) -> None:
    parts = dict.fromkeys(("config.json", "model.safetensors", "tokenizer.json"), "{}")
    for name, text in {**parts, **files}.items():
        (tmp_path / name).write_text(text)
    config = config_of(model={"path": str(tmp_path)}, gateway={"template": "chat"}, prompts={"task": "gcd"})
    expected = f"gateway.template is 'chat', but {tmp_path} has no chat template: add chat_template.jinja, or use"
    assert any(each.startswith(expected) for each in missing_requirements(config)) != found
    assert not list(model_problems(config)), "the tokenizer of the prompts can be used"


def test_model_of_a_warm_start_has_no_chat_template() -> None:
    warm = {"model": {"task": "chain_sum"}}
    config = config_of(warm_start=warm, gateway={"template": "chat"}, prompts={"task": "chain_sum"})
    expected = "gateway.template is 'chat', but the model of [warm_start] has no chat template: use 'plain' or 'auto'"
    assert expected in list(missing_requirements(config))


def test_host_checks_name_missing_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)  # half a billion parameters
    config = config_of(run={"name": "checked", "folder": str(tmp_path / "runs")}, model={"path": str(model)})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=15 << 30))
    (disk,) = host_problems(config, new=True)
    assert disk.startswith(f"run.folder: {tmp_path} has 15.0 GiB free, but 3 checkpoints of 536870912 trained param")
    assert "need 18.0 GiB: free some space, or lower trainer.checkpoints_kept" in disk
    assert list(host_problems(config, new=False)) == []
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "hidden_size": 1024}))
    lora = {"lora": {"rank": 16}}
    assert list(host_problems(replace(config, trainer=config_of(trainer={"learner": lora}).trainer), new=True)) == []
    ppo = config_of(trainer={"learner": {**lora, "algorithm": {"name": "ppo"}}}).trainer
    assert "checkpoints of 562036736 trained parameters" in next(host_problems(replace(config, trainer=ppo), new=True))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    assert [each.partition(":")[0] for each in host_problems(config, new=True)] == ["run.folder", "relay.store"]
    store = tmp_path / "store"
    store.mkdir()
    config = replace(config, relay=replace(config.relay, store=str(store)))
    (room,) = store_problems(config)
    assert room.startswith(
        f"relay.store: {store} has 1.0 GiB free, but 2 weight versions of 536870912 parameters need 4"
    )
    with (store / "1.1.safetensors").open("wb") as file:
        file.truncate(3 * GIB)
    assert list(store_problems(config)) == []  # what the store holds already is room for newer versions


def test_host_checks_name_a_folder_without_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    config = config_of(run={"name": "checked", "folder": "/proc/laminar"}, model={"path": str(model)})
    (problem,) = host_problems(config, new=True)
    assert problem.startswith("run.folder: /proc/laminar/checked cannot be written: no file can be created in /proc (")
    assert problem.endswith("): set another run.folder")
    config = config_of(run={"name": "checked", "folder": str(tmp_path)}, trainer={"checkpoint_folder": "/proc/ckpt"})
    (problem,) = host_problems(config, new=True)
    assert problem.startswith(
        "trainer.checkpoint_folder: /proc/ckpt cannot be written: no file can be created in /proc"
    )
    config = config_of(run={"name": "checked", "folder": str(tmp_path)}, relay={"object_store": "/proc/weights"})
    assert any(
        each.startswith("relay.object_store: /proc/weights cannot be") for each in host_problems(config, new=True)
    )


@pytest.mark.parametrize("key", ["trainer.checkpoint_folder", "relay.object_store"])
def test_host_checks_name_an_object_store_without_bucket(tmp_path: Path, key: str) -> None:
    with object_store() as store:
        found = {}
        for place in (store.bucket("there"), store.uri("none/folder")):
            section, _, name = key.partition(".")
            config = config_of(run={"name": "checked", "folder": str(tmp_path)}, **{section: {name: place}})
            found[place] = list(host_problems(config, new=True))
        written, (missing, (problem,)) = found.pop(store.uri("there/folder")), found.popitem()
        assert written == []
        assert problem.startswith(f"{key}: {missing} cannot be written: ")
        assert "NO_SUCH_BUCKET" in problem
        assert problem.endswith(f"or set another {key}")
        assert list(open_storage(store.uri("there/folder/checked")).iterdir()) == []


@pytest.mark.parametrize(
    ("store", "advice"),
    [
        ("auto", "Choose another name with --name, or stop that run"),
        ("/s", "Set another relay.store, or stop that run"),
    ],
)
def test_store_in_use_names_the_setting_that_helps(store: str, advice: str) -> None:
    text = store_in_use(config_of(relay={"store": store}), StoreBusy("/s is in use by process 5"))
    assert "/s is in use by process 5" in text
    assert text.endswith(advice)
    assert text.startswith("relay.store: " if store == "/s" else "run 'checked' is active on this machine: ")


@pytest.mark.parametrize(
    ("host", "agents", "url", "refused"),
    [
        ("0.0.0.0", {"command": ["true"]}, "", True),
        ("::", {"function": "agent:solve"}, "", True),
        ("0.0.0.0", {"command": ["true"]}, "https://gateway:8443/v1", False),  # as in a container
        ("0.0.0.0", {}, "", False),  # the owners of agents elsewhere know a name
        ("here.example", {"command": ["true"]}, "", False),
    ],
)
def test_agents_of_a_run_need_a_host_to_connect_to(
    host: str, agents: dict[str, Any], url: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url:
        monkeypatch.setenv(GATEWAY_URL, url)
    files = {"certificate_file": "gateway.pem", "key_file": "gateway.pem"}
    prompts = {"task": "gcd", "environment": "agent"}
    config = config_of(gateway={"host": host, **files}, prompts=prompts, agents=agents)
    expected = (
        f"gateway.host is {host}, to which no agent of this run can connect: set gateway.advertise to the host name in "
        "gateway.pem"
    )
    assert (expected in problems_of(config)) == refused
    assert (expected in role_problems(config, Role("agents"))) == refused
    assert expected not in role_problems(config, Role("gateway")), "agents of another machine may have its address"
    named = config_of(gateway={"host": host, "advertise": "here.example", **files}, prompts=prompts, agents=agents)
    assert not any("no agent of this run" in problem for problem in problems_of(named))


@pytest.mark.parametrize("key", ["relay", "gateway"])
def test_host_checks_name_a_used_port(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        config = config_of(**{key: {"port": port}})
        (problem,) = port_problems(config)
    assert problem == f"{key}.port: 127.0.0.1:{port} cannot be used: Address already in use"
    assert list(port_problems(config)) == []


def test_host_checks_name_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for folder in (tmp_path / "runs", tmp_path / "runs" / "mine"):
        (problem,) = host_problems(config_of(run={"name": "checked", "folder": str(folder)}), new=True)
        assert problem == f"run.folder: {tmp_path}/runs is a file: set another run.folder"


def test_config_problems_are_one_line_or_a_list() -> None:
    one = ConfigProblems(["reward: KeyError\n  File a"])
    assert (str(one), one.detail_lines) == ("reward: KeyError", ("  File a",))
    two = ConfigProblems(["reward: KeyError\n  File a", "heldout"])
    assert str(two) == "the run cannot start: 2 problems"
    assert two.detail_lines == ("reward: KeyError", "  File a", "heldout")
