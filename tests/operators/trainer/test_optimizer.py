"""The learning-rate schedule, AdamW steps and weight decay."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from operators.trainer import trained_model as optimizers
from operators.trainer.config import LearnerConfig, ParameterGroup
from operators.trainer.presets import learning_rate
from operators.trainer.trained_model import TrainedModel, build_optimizer, move_state, reject_unmatched_groups

CONSTANT = LearnerConfig(learning_rate=1.0, warmup_steps=4)
COSINE = LearnerConfig(learning_rate=1.0, warmup_steps=2, schedule="cosine", total_steps=10, final_learning_rate=0.2)

LINE = LearnerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", total_steps=10, final_learning_rate=0.2)


@pytest.mark.parametrize(
    ("config", "update", "expected"),
    [
        (CONSTANT, 0, 0.25),
        (CONSTANT, 3, 1.0),
        (CONSTANT, 1000, 1.0),
        (LearnerConfig(learning_rate=1.0, warmup_steps=0), 0, 1.0),
        (LearnerConfig(learning_rate=1.0, warmup_steps=0, total_steps=10), 9, 1.0),
        (COSINE, 0, 0.5),
        (COSINE, 2, 1.0),
        (COSINE, 6, 0.6),
        (COSINE, 10, 0.2),
        (COSINE, 99, 0.2),
        (LINE, 1, 1.0),
        (LINE, 4, 0.8),
        (LINE, 10, 0.2),
        (LINE, 99, 0.2),
    ],
)
def test_learning_rate_schedule(config: LearnerConfig, update: int, expected: float) -> None:
    assert learning_rate(update, config) == pytest.approx(expected)


def test_weight_decay_applies_to_matrices_only() -> None:
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("matrix", (2, 2)), ("bias", (2,)))}
    optimizer = build_optimizer(parameters, LearnerConfig(learning_rate=0.1, weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameters["matrix"].tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert parameters["bias"].tolist() == [1.0, 1.0]


def test_optimizer_steps_match_adamw() -> None:
    """Moments, bias correction and decoupled weight decay (arXiv 1711.05101, algorithm 2)."""
    parameter = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    config = LearnerConfig(learning_rate=0.1, weight_decay=0.5, betas=(0.5, 0.75), epsilon=1e-3)
    optimizer = build_optimizer({"w": parameter}, config)
    value, first, second = 1.0, 0.0, 0.0
    for step, gradient in enumerate((2.0, -1.0, 0.5), 1):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        first, second = 0.5 * first + 0.5 * gradient, 0.75 * second + 0.25 * gradient**2
        value *= 1 - 0.1 * 0.5
        value -= 0.1 * first / (1 - 0.5**step) / (math.sqrt(second / (1 - 0.75**step)) + 1e-3)
        assert parameter.item() == pytest.approx(value, rel=1e-9)


def test_first_matching_parameter_group_applies() -> None:
    names = ("embed.weight", "layer.weight", "head.weight")
    parameters = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in names}
    groups = (
        ParameterGroup(match="^embed", weight_decay=0.0),
        ParameterGroup(match="head", learning_rate_factor=0.5),
        ParameterGroup(match="embed|head", weight_decay=9.0),
    )
    optimizer = build_optimizer(parameters, LearnerConfig(weight_decay=0.1, parameter_groups=groups))
    found = {
        name: (group["weight_decay"], group["factor"])
        for group in optimizer.param_groups
        for name, parameter in parameters.items()
        if any(parameter is member for member in group["params"])
    }
    assert found == {"embed.weight": (0.0, 1.0), "layer.weight": (0.1, 1.0), "head.weight": (0.1, 0.5)}


def test_parameter_groups_must_match_a_parameter() -> None:
    groups = (ParameterGroup(match="norm"), ParameterGroup(match="embd"))
    config = LearnerConfig(parameter_groups=groups)
    with pytest.raises(
        ValueError, match=r"parameter_groups: match = 'embd' matches no trained parameter, such as embed"
    ):
        reject_unmatched_groups(config, ["embed.weight", "norm.weight"])
    reject_unmatched_groups(config, ["norm.weight", "embd.weight"])


def test_move_state_waits_for_the_tensors_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step counts stay: AdamW reads them on the device of the parameters."""
    waits: list[set[torch.device]] = []
    monkeypatch.setattr(optimizers, "synchronize", lambda *devices: waits.append(set(devices)))
    gpu, host = torch.device("cuda:3"), torch.device("cpu")
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer({"matrix": weight}, LearnerConfig())
    with FakeTensorMode():
        state = {"step": torch.zeros((), device=gpu), "exp_avg": torch.zeros(2, 2, device=gpu)}
        optimizer.state[weight] = state
        for device, expected in ((host, [gpu, host]), (gpu, [gpu, gpu])):
            move_state(optimizer, device)
            assert [value.device for value in state.values()] == expected
    assert waits == [{gpu, host}, {gpu, host}]


@pytest.mark.parametrize("offload", [(), ("moments",)])
def test_model_moves_with_the_moments_that_are_not_offloaded(
    offload: tuple[Literal["moments"], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TrainedModel(torch.nn.Linear(2, 2), LearnerConfig(offload=offload), lambda: None)
    moves: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(optimizers, "move_module", lambda _, device: moves.append(("weights", device)))
    monkeypatch.setattr(optimizers, "move_state", lambda _, device: moves.append(("moments", device)))
    device = torch.device("meta")
    model.move(device)
    assert moves == [("weights", device), *([] if offload else [("moments", device)])]


@pytest.mark.parametrize("finite", [True, False])
def test_gradients_are_cleared_once_a_step_is_taken(finite: bool) -> None:
    """Their memory is for what is computed until the next one, such as scores of the next batch."""
    module = torch.nn.Linear(2, 2)
    model = TrainedModel(module, LearnerConfig(), lambda: None)
    module(torch.ones(2)).sum().backward()
    assert model.step(0.01, finite=finite) > 0 or not finite
    assert {parameter.grad for parameter in module.parameters()} == {None}


def test_step_has_the_rate_times_the_factor_of_its_group() -> None:
    groups = (ParameterGroup(match="bias", learning_rate_factor=0.5),)
    model = TrainedModel(torch.nn.Linear(2, 2), LearnerConfig(parameter_groups=groups), lambda: None)
    model.zero_grad()
    assert model.step(0.01, finite=True) == 0
    assert [(group["factor"], group["lr"]) for group in model._optimizer.param_groups] == [(1.0, 0.01), (0.5, 0.005)]
