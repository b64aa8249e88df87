"""The division of a machine's GPUs between the trainer and the rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config import parse_config
from pipelines.roles import Role
from pipelines.run import learnability, preflight
from pipelines.run.learnability import doubtful_settings
from pipelines.run.preflight import absent_gpus, gpu_problems, shared_gpus


@pytest.mark.parametrize(
    ("trainer", "rollout", "visible", "says"),
    [
        ({}, {}, "", ""),
        ({}, {}, "01", ""),
        ({"device": "cuda"}, {}, "", "trainer.device = 'cuda', but this machine has no GPU"),
        ({"device": "cuda:0"}, {}, "0", ""),  # a machine with one GPU has no other way
        ({"device": "cuda:0"}, {}, "01", "trainer and rollouts share GPU 0"),
        ({"device": "cuda", "gpus": [1]}, {"processes": 2}, "01", "trainer and rollouts share GPU 1"),
        ({"device": "cuda", "gpus": [1]}, {"processes": 2, "gpus": [0]}, "01", ""),
        ({"device": "cuda", "gpus": [2]}, {}, "01", "the trainer uses GPU 2, but this machine has 2 GPUs"),
        ({"device": "cuda", "gpus": [0]}, {"gpus": [4]}, "01", "rollout.gpus has 4, but this machine has 2 GPUs"),
        ({"device": "cuda", "gpus": [3]}, {}, "4567", ""),
        ({"device": "cuda", "gpus": [0]}, {}, "4567", "trainer and rollouts share GPU 4"),
        ({}, {"engine": "emulated", "gpus": [9]}, "01", ""),
        ({"device": "cuda"}, {}, "01", "trainer and rollouts share GPU 0"),
        ({"device": "cuda"}, {"gpus": [1]}, "01", ""),
        ({"device": "cuda", "ranks": 2}, {"gpus": [2]}, "012", ""),
        ({"device": "cuda", "ranks": 2}, {"gpus": [0]}, "01", "trainer and rollouts share GPU 0"),
        ({"device": "cuda", "ranks": 3, "gpus": [0, 1]}, {"gpus": [2]}, "012", "has 2 of this machine's GPUs"),
        ({"device": "cuda:1", "ranks": 2}, {"gpus": [0]}, "01", "has 1 of this machine's GPUs"),
        ({"device": "cuda", "ranks": 2}, {}, "0", "has 1 of this machine's GPUs"),
        ({}, {"engine": "vllm", "vllm": {"quantization": "fp8"}}, "", "rollout.vllm.quantization = 'fp8' needs a GPU"),
        ({}, {"engine": "vllm", "vllm": {"quantization": "fp8"}}, "0", ""),
        ({}, {"engine": "vllm", "vllm": {"sleepy": True}}, "0", "rollout.vllm.sleepy is no engine argument"),
    ],
)
def test_gpu_problems_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], rollout: dict[str, Any], visible: str, says: str
) -> None:
    monkeypatch.setattr(preflight, "argument_names", lambda: {"quantization"})
    problems = list(gpu_problems(parse_config({"trainer": trainer, "rollout": rollout}, "my.toml"), tuple(visible)))
    assert len(problems) == bool(says)
    assert says in "".join(problems)


@pytest.mark.parametrize(
    ("role", "others", "visible", "says"),
    [
        ("trainer-1", "rollout-0 rollout-1", "0123", "share GPU 1"),
        ("rollout-1", "trainer-1 score-0 rollout-5", "0123", "share GPU 1"),
        ("rollout-2", "trainer-0 trainer-1", "0123", ""),
        ("rollout-1", "rollout-5", "0123", ""),  # rollouts of other machines wrap around
        ("trainer-0", "rollout-0", "0", ""),
        ("trainer-0", "rollout-0", "", ""),
        ("trainer-0", "trainer-0 trainer-1", "0123", ""),
        (
            "trainer-2",
            "trainer-0 trainer-1",
            "0123",
            "trainer, which runs on this machine, share GPU 0, and ranks share",
        ),
    ],
)
def test_shared_gpus_of_submitted_roles(role: str, others: str, visible: str, says: str) -> None:
    config = parse_config({"trainer": {"device": "cuda", "gpus": [0, 1], "ranks": 2}}, "my.toml")
    here = [Role(name, int(index)) for name, _, index in (each.rpartition("-") for each in others.split())]
    name, _, index = role.rpartition("-")
    problems = list(shared_gpus(config, Role(name, int(index)), here, tuple(visible)))
    assert len(problems) == bool(says)
    assert says in "".join(problems)


@pytest.mark.parametrize(
    ("role", "trainer", "rollout", "visible", "says"),
    [
        (Role("trainer"), {"device": "cuda"}, {}, "", "trainer.device = 'cuda', but this machine has no GPU"),
        (Role("trainer", 9), {"device": "cuda", "ranks": 16}, {}, "01234567", ""),
        (Role("trainer", 9), {"device": "cuda", "ranks": 16, "gpus": [2, 8]}, {}, "01234567", "the trainer uses GPU 8"),
        (Role("trainer", 8), {"device": "cuda", "ranks": 16, "gpus": [2, 8]}, {}, "01234567", ""),
        (Role("trainer"), {}, {"gpus": [4]}, "01", ""),
        (
            Role("rollout", 5),
            {"device": "cuda"},
            {"gpus": [4]},
            "01",
            "rollout.gpus has 4, but this machine has 2 GPUs",
        ),
        (Role("rollout"), {"device": "cuda"}, {}, "", ""),
        (Role("rollout"), {}, {"engine": "vllm", "vllm": {"enforce_eager": False}}, "", "rollout.vllm.enforce_eager"),
        (Role("rollout"), {}, {"engine": "vllm", "vllm": {"enforce_eager": False}}, "0", ""),
        (Role("rollout"), {}, {"gpus": [4], "engine": "emulated"}, "01", ""),
        (Role("score"), {"device": "cuda"}, {"gpus": [4]}, "", ""),
    ],
)
def test_absent_gpus_of_a_submitted_role(
    role: Role, trainer: dict[str, Any], rollout: dict[str, Any], visible: str, says: str
) -> None:
    config = parse_config({"trainer": trainer, "rollout": rollout}, "my.toml")
    problems = list(absent_gpus(config, role, tuple(visible)))
    assert len(problems) == bool(says)
    assert says in "".join(problems)


@pytest.mark.parametrize(
    ("gpus", "megabytes", "device", "doubtful"),
    [(1, 400, "cpu", 1), (0, 400, "cpu", 0), (1, 4, "cpu", 0), (1, 400, "cuda", 0)],
)
def test_training_on_the_cpu_beside_gpus_is_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, megabytes: int, device: str, doubtful: int
) -> None:
    monkeypatch.setattr(learnability, "visible_gpus", lambda: ("0",) * gpus)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(megabytes * 10**6)  # only its size is read
    config = parse_config({"model": {"path": str(tmp_path)}, "trainer": {"device": device}}, "my.toml")
    found = [text for text in doubtful_settings(config) if "on a machine with GPUs" in text]
    assert len(found) == doubtful
    assert all("0.1 billion parameters on the CPU. Set trainer.device = 'cuda'" in text for text in found)
