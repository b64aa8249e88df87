"""How policies and their references are loaded, what is refused, and the micro-batches that they compute."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from trainer_batches import make_batch, save_experts, save_tiny_model

from operators.trainer import policy
from operators.trainer.batch import join_parts
from operators.trainer.config import AlgorithmConfig, LearnerConfig, ParameterGroup, Precision
from operators.trainer.context_parallel import ContextGroup
from operators.trainer.packing import (
    PackedTokens,
    blank_micro_batch,
    micro_batches,
    pack,
    pack_tokens,
    plan_micro_batches,
)
from operators.trainer.policy import TOLERANCE, check_packed, check_trainable, load_policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("policy") / "model")


def test_reference_computes_what_the_policy_does(folder: Path) -> None:
    """Over sequences side by side, of which none attends to another."""
    batch = join_parts(make_batch())
    part = pack(batch, np.arange(len(batch)), CPU)
    trained, reference = load_policy(folder, CPU), load_policy(folder, CPU, trained=False)
    with torch.no_grad():
        torch.testing.assert_close(reference(part.packed)[0], trained(part.packed)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_layers_and_an_own_embedding_are_gathered_separately(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """An embedding that is the output layer, too, stays with the whole model."""
    save_experts(experts := folder.with_name("experts"))
    shard, register = Mock(), Mock()
    monkeypatch.setattr(policy, "shard", shard)
    monkeypatch.setattr(policy, "register_fsdp_forward_method", register)
    loaded = load_policy(folder if tied else experts, CPU, keep_gathered=True)
    layers = [*loaded.model.model.layers]
    separate = [] if tied else [loaded.model.get_input_embeddings()]
    shard.assert_called_once_with(loaded, [*layers, *separate], None, "float32", True)
    register.assert_called_once_with(loaded, "plain_logprobs")


def test_entropies_are_those_of_a_whole_context_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = join_parts(make_batch())
    packed, loaded = pack(batch, np.arange(len(batch)), CPU).packed, load_policy(folder, CPU)
    own = loaded(packed, with_entropy=True)
    monkeypatch.setattr(PackedTokens, "gather", lambda packed, own: torch.cat([own, own]))
    for gathered, part in zip(loaded(packed, with_entropy=True), own, strict=True):
        torch.testing.assert_close(gathered, torch.cat([part, part]))
    monkeypatch.undo()
    assert loaded(packed)[1] is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_experts_compute_in_the_precision_of_the_model(folder: Path, precision: str) -> None:
    """The grouped kernel computes in the weights' dtype, whatever autocast says."""
    save_experts(experts := folder.with_name("experts"))
    loaded = load_policy(experts, CPU, precision=precision)  # type: ignore[arg-type]
    assert (loaded.model.config._experts_implementation == "eager") is (precision == "bfloat16")


def test_model_without_heads_for_a_context_is_refused(folder: Path) -> None:
    check_trainable(folder, LearnerConfig(), 2)
    with pytest.raises(ValueError, match="context_ranks is 3, but the model has 2 attention heads"):
        check_trainable(folder, LearnerConfig(), 3)


def test_heads_for_a_context_are_checked_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock()
    monkeypatch.setattr(policy, "read_weights", read)
    with pytest.raises(ValueError, match="context_ranks is 3, but the model has 2 attention heads"):
        load_policy(folder, CPU, context_ranks=3)
    read.assert_not_called()


def test_checkpointed_layers_save_no_random_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is random: the whole model is in evaluation mode, without dropout."""
    batch = join_parts(make_batch())
    packed, loaded = (
        pack(batch, np.arange(len(batch)), CPU).packed,
        load_policy(folder, CPU, gradient_checkpointing=True),
    )
    assert not any(module.training for module in loaded.model.modules())
    saved = Mock(side_effect=torch.get_rng_state)
    monkeypatch.setattr(torch, "get_rng_state", saved)
    loaded(packed)[0].sum().backward()
    saved.assert_not_called()


def test_group_must_match_a_parameter_that_may_exist(folder: Path) -> None:
    groups = (ParameterGroup(match="value_head"),)
    with pytest.raises(ValueError, match="match = 'value_head' matches no trained parameter"):
        check_trainable(folder, LearnerConfig(parameter_groups=groups), 1)
    check_trainable(folder, LearnerConfig(parameter_groups=groups, algorithm=AlgorithmConfig(name="ppo")), 1)


@pytest.mark.parametrize(("precision", "within"), [("float32", 0.005), ("bfloat16", 2.0)])
def test_packed_logprobs_may_differ_by_a_share_of_the_largest(precision: Precision, within: float) -> None:
    plain = torch.tensor([-1.0, -100.0])
    check_packed(plain + within, plain, precision)
    for beyond in (2 * within, torch.tensor([0.0, 2 * within])):
        with pytest.raises(ValueError, match="differ from those of its own forward"):
            check_packed(plain + beyond, plain, precision)
    with pytest.raises(ValueError, match="by nan of the largest"):
        check_packed(plain * torch.nan, plain, "float32")
    assert TOLERANCE["float32"] * 100 == pytest.approx(0.01)


@pytest.mark.parametrize(("temperatures", "kept"), [((1.0, 1.0), None), ((2.0, 2.0), [2.0] * 3)])
def test_temperatures_other_than_one_are_packed(temperatures: tuple[float, float], kept: list[float] | None) -> None:
    mask = np.array([False, True, False, True, True])
    packed = pack_tokens(np.arange(5), mask, np.array([2, 3]), CPU, np.array(temperatures, np.float32))
    assert (None if packed.temperatures is None else packed.temperatures.tolist()) == kept


def test_micro_batches_are_those_of_the_plan() -> None:
    """A context group has the budget of all its ranks; a rank with the longest plan adds nothing blank."""
    batch = join_parts(make_batch())
    rows, budget = np.arange(len(batch)), int(batch.lengths.max())
    for context in (ContextGroup(), ContextGroup(0, 2)):
        plan = plan_micro_batches(batch.lengths, rows, budget * context.count)
        found = list(micro_batches(batch, rows, budget, CPU, context=context))
        assert [part.rows.unique().tolist() for part in found] == [sorted(part.tolist()) for part in plan]


def test_blank_micro_batch_is_a_token_that_is_not_trained() -> None:
    blank = blank_micro_batch(CPU)
    assert blank.packed.token_ids.tolist() == [[0]]
    lengths = [len(each) for each in (blank.packed.targets, blank.behaviour, blank.segments, blank.places, blank.rows)]
    assert lengths == [0] * 5
    assert blank.sequences == 1
    assert blank.packed.layout.positions.tolist() == [[0]]
