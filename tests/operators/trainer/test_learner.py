"""The learner: an update is the gradient of the formula, the same every time, and refuses what it cannot use."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_batches import make_batch, save_tiny_model, with_floats

from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors
from operators.trainer.algorithms import ALGORITHMS
from operators.trainer.batch import join_parts
from operators.trainer.config import AlgorithmConfig, AlgorithmName, CriticConfig, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.packing import mini_batches
from schemas import columns
from schemas.records import MicroBatch

CONFIG = LearnerConfig(learning_rate=1e-2, warmup_steps=2, micro_batch_tokens=64, weight_decay=0.01)


def digest(learner: Learner) -> str:
    """A hash of all weights."""
    hashed = hashlib.sha256()
    for name, tensor in weight_tensors(learner.model).items():
        hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def test_the_gradient_is_that_of_the_formula(folder: Path) -> None:
    """GRPO by hand, one sequence at a time, through the model's own forward: stale data, clipping, all rows."""
    rows = make_batch(parts=2)
    against_rollouts = AlgorithmConfig(proximal="behaviour", correction="none")
    config = LearnerConfig(warmup_steps=0, micro_batch_tokens=64, max_gradient_norm=1e9, algorithm=against_rollouts)
    learner = Learner(config, folder)
    metrics = learner.update(rows)
    batch, model = join_parts(rows), load_model(folder)
    losses, clipped = [], [0, 0]
    for row in range(len(batch)):
        tokens = slice(batch.starts[row], batch.starts[row] + batch.lengths[row])
        ids, mask = torch.from_numpy(batch.token_ids[tokens]), torch.from_numpy(batch.loss_mask[tokens])
        logits = model(input_ids=ids[None]).logits[0, :-1] / float(batch.temperatures[row])
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratios = (logprobs - torch.from_numpy(batch.behaviour[tokens])[1:]).exp()[mask[1:]]
        group = batch.rewards[batch.group_keys == batch.group_keys[row]]
        advantage = float((batch.rewards[row] - group.mean()) / (group.std(ddof=1) + 1e-6))
        tokenwise = -torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.28) * advantage)
        losses.append(tokenwise.sum() / int(mask.sum()))
        clipped[0] += int((ratios < 0.8).sum()) * (advantage < 0)
        clipped[1] += int((ratios > 1.28).sum()) * (advantage > 0)
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in expected.values() if gradient is not None))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert min(clipped) > 0
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * norm, rtol=1e-3)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_gradients_added_up_over_micro_batches_are_those_of_one_big_batch(folder: Path, name: AlgorithmName) -> None:
    algorithm = AlgorithmConfig(name=name, kl_coefficient=0.1)
    gradients = []
    for budget in (10**6, 1000, 40, 1):
        config = LearnerConfig(algorithm=algorithm, micro_batch_tokens=budget, max_gradient_norm=1e9)
        learner = Learner(config, folder)
        learner.update(make_batch(parts=2))
        models = [learner.model, *([learner._critic] if learner._critic else [])]
        gradients.append([flat_gradient(model) for model in models])
    whole, *split = gradients
    for parts in split:
        for one, other in zip(parts, whole, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()
            assert other.norm() > 1e-3


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_trains(folder: Path, name: AlgorithmName) -> None:
    learner = Learner(LearnerConfig(algorithm=AlgorithmConfig(name=name, max_response_tokens=20)), folder)
    before = digest(learner)
    metrics = learner.update(make_batch())
    assert digest(learner) != before
    assert 0 < metrics["grad_norm"] < math.inf


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"cispo", "icepop"}))
def test_one_update_of_stale_data_has_all_of_its_correction_in_the_weight(folder: Path, name: AlgorithmName) -> None:
    """Decoupled, ρ = 1 throughout: nothing is clipped, and the weights are those of π_o/μ, truncated."""
    config = LearnerConfig(algorithm=AlgorithmConfig(name=name, correction_cap=1.1, max_response_tokens=20))
    metrics = Learner(config, folder).update(make_batch())
    assert not {"clip_ratio/low", "clip_ratio/high"} & set(metrics)  # no ratio differs from 1: not applicable
    assert metrics["importance_ratio/max"] > 1.1
    assert 0 < metrics["correction/weight_mean"] < 1.1
    assert metrics["correction/weight_mean"] < metrics["importance_ratio/mean"]


@pytest.mark.parametrize("name", ["grpo", "decoupled_ppo"])
def test_rows_without_advantage_are_skipped_at_no_difference(folder: Path, name: AlgorithmName) -> None:
    rows = [with_floats(row, "rewards", _rewards_alike_in_first_group(row)) for row in make_batch(parts=2)]
    config = LearnerConfig(algorithm=AlgorithmConfig(name=name, aggregation="token_mean"))
    skipping, whole = Learner(config, folder), Learner(config, folder)
    whole._rows_with_gradient = lambda batch, targets: torch.arange(len(batch)).numpy()  # type: ignore[method-assign]
    few, all_ = skipping.update(rows), whole.update(rows)
    assert few["batch/skipped_rows"] >= 4
    assert all_["batch/skipped_rows"] == 0
    assert few["loss"] == pytest.approx(all_["loss"], abs=1e-6)
    gradients = zip(skipping.model.parameters(), whole.model.parameters(), strict=True)
    for one, other in gradients:
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6 * few["grad_norm"], rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_batches_give_bit_identical_weights(folder: Path, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        digests = set()
        for _ in range(2):
            learner = Learner(CONFIG, folder)
            for number in range(3):
                learner.update(make_batch(seed=number, number=number, parts=2))
            digests.add(digest(learner))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_data_that_cannot_be_used_change_nothing(folder: Path) -> None:
    learner = Learner(CONFIG, folder)
    before = digest(learner)
    (row,) = make_batch()
    with pytest.raises(ValueError, match=row.trajectory_ids[1]):
        learner.update([with_floats(row, "rewards", {1: math.nan})])
    assert (digest(learner), learner.updates) == (before, 0)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_of_another_tokenizer_change_nothing(folder: Path, token: int) -> None:
    learner = Learner(CONFIG, folder)
    before = digest(learner)
    (row,) = make_batch()
    ids = row.token_ids.to_numpy().copy()
    ids[row.lengths.to_numpy()[0]] = token
    with pytest.raises(ValueError, match=rf"{row.trajectory_ids[1]} has a token that the model, of \d+, does not know"):
        learner.update([replace(row, token_ids=columns.token_ids(ids))])
    assert (digest(learner), learner.updates) == (before, 0)


def test_a_sequence_of_many_times_the_budget_is_trained_alone(folder: Path) -> None:
    config = LearnerConfig(micro_batch_tokens=2, max_gradient_norm=1e9)
    long, short = Learner(config, folder), Learner(LearnerConfig(max_gradient_norm=1e9), folder)
    assert long.update(make_batch())["grad_norm"] == pytest.approx(short.update(make_batch())["grad_norm"], rel=1e-4)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(folder: Path) -> None:
    learner = Learner(CONFIG, folder)
    learner.update(make_batch())
    before = digest(learner)
    handle = learner.model.get_output_embeddings().register_forward_hook(lambda *args: args[2] * math.inf)
    metrics = learner.update(make_batch(seed=1))
    handle.remove()
    assert not math.isfinite(metrics["grad_norm"])
    assert (metrics["skipped_updates"], learner.updates, digest(learner)) == (1, 2, before)
    assert learner.update(make_batch(seed=2))["skipped_updates"] == 1
    assert digest(learner) != before


def test_vocabulary_larger_than_the_tokenizers_is_trained(tmp_path: Path) -> None:
    """Embeddings are padded for speed: ids beyond the tokenizer have a probability, and may have been drawn."""
    model, known = load_model(save_tiny_model(tmp_path / "small")), 300
    model.resize_token_embeddings(known + 20, mean_resizing=False)
    model.save_pretrained(tmp_path / "model")
    learner = Learner(CONFIG, tmp_path / "model")
    (row,) = make_batch()
    ids = row.token_ids.to_numpy().copy()
    ids[row.lengths.to_numpy()[0] - 1] = known + 15
    assert math.isfinite(learner.update([replace(row, token_ids=columns.token_ids(ids))])["grad_norm"])


def test_a_batch_of_equal_rewards_is_no_error(folder: Path) -> None:
    (row,) = make_batch()
    alike = with_floats(row, "rewards", dict.fromkeys(range(len(row.trajectory_ids)), 1.0))
    metrics = Learner(CONFIG, folder).update([alike])
    assert (metrics["batch/skipped_rows"], metrics["grad_norm"]) == (16, 0)
    assert metrics["frac_reward_zero_std"] == 1


def test_the_gradient_is_scaled_down_to_its_bound(folder: Path) -> None:
    learner = Learner(LearnerConfig(max_gradient_norm=1e-3), folder)
    assert learner.update(make_batch())["grad_norm"] > 1e-2
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in learner.model.parameters() if p.grad is not None))
    assert norm == pytest.approx(1e-3, rel=1e-2)


def test_a_kl_penalty_holds_the_policy_near_the_initial_model(folder: Path) -> None:
    drift = {}
    for coefficient in (0.001, 10.0):
        config = LearnerConfig(learning_rate=3e-3, algorithm=AlgorithmConfig(kl_coefficient=coefficient))
        learner = Learner(config, folder)
        (row,) = make_batch()
        values = [learner.update([row])["kl/ref"] for _ in range(8)]
        assert values[0] == pytest.approx(0, abs=1e-6)
        drift[coefficient] = values[-1]
    assert 0 < drift[10.0] < 0.5 * drift[0.001]


def test_several_steps_a_batch_clip_against_the_policy_it_began_with(folder: Path) -> None:
    """Decoupled with one step has ρ = 1; with several, π moves away from π_o and is clipped against it."""
    algorithm = AlgorithmConfig(name="decoupled_ppo", clip_low=0.01, clip_high=0.01)
    config = LearnerConfig(algorithm=algorithm, learning_rate=1e-2, warmup_steps=0, mini_batches=2, epochs=2)
    learner = Learner(config, folder)
    metrics = learner.update(make_batch())
    assert metrics["clip_ratio/low"] > 0
    assert metrics["clip_ratio/high"] > 0
    assert {int(value) for name, value in learner.state().moments.items() if name.startswith("step.")} == {4}


def test_mini_batches_are_whole_groups_and_none_is_left_out() -> None:
    groups = np.array([0, 1, 2, 0, 1, 2, 3, 4])
    found = mini_batches(groups, 2)
    assert [sorted(set(groups[rows])) for rows in found] == [[0, 1, 2], [3, 4]]
    assert sorted(np.concatenate(found)) == list(range(8))
    assert len(mini_batches(groups, 9)) == 5


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_ppo_has_a_critic_that_learns_what_responses_earn(folder: Path, kl: float) -> None:
    """The values of one batch, seen again and again, come to explain its returns; resumed, to the same bits."""
    algorithm = AlgorithmConfig(name="ppo", kl_coefficient=kl, kl_in="reward", kl_kind="k1")
    config = LearnerConfig(algorithm=algorithm, warmup_steps=0, critic=CriticConfig(learning_rate=1e-2, value_clip=9.0))
    learner = Learner(config, folder)
    told = [learner.update(make_batch()) for _ in range(10)]
    assert told[0]["critic/explained_variance"] == 0  # every value is 0 at first
    assert told[-1]["critic/explained_variance"] > 0.5
    assert told[-1]["critic/loss"] < 0.5 * told[0]["critic/loss"]
    assert ("kl/ref" in told[0]) is (kl > 0)
    assert {"time/actor_use", "time/critic_use"} <= set(told[0])


def test_a_critic_may_learn_before_the_policy_does(folder: Path) -> None:
    config = LearnerConfig(algorithm=AlgorithmConfig(name="ppo"), critic=CriticConfig(warmup_batches=1))
    learner = Learner(config, folder)
    before = digest(learner)
    assert "loss" not in learner.update(make_batch())
    assert digest(learner) == before
    assert "loss" in learner.update(make_batch())
    assert digest(learner) != before


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_device_that_is_shared_changes_nothing(folder: Path, name: AlgorithmName) -> None:
    digests = set()
    for share in (False, True):
        algorithm = AlgorithmConfig(name=name, kl_coefficient=0.1)
        learner = Learner(LearnerConfig(algorithm=algorithm, share_device=share), folder)
        for number in range(2):
            metrics = learner.update(make_batch(seed=number))
        digests.add(digest(learner))
        assert ("time/reference_load" in metrics) is share
        assert ("time/actor_offload" in metrics) is share
    assert len(digests) == 1


def test_layers_made_again_in_the_backward_pass_give_the_same_gradient(folder: Path) -> None:
    gradients = {}
    for again in (False, True):
        learner = Learner(LearnerConfig(gradient_checkpointing=again), folder)
        runs = []
        for layer in learner.model.base_model.layers:
            layer.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
            layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(2))
        learner.update(make_batch())
        gradients[again] = [parameter.grad for parameter in learner.model.parameters()]
        assert runs.count(2) == (2 if again else 1) * runs.count(1)
        assert not any(module.training for module in learner.model.modules() if not list(module.children()))
    for one, other in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_bfloat16_leaves_weights_in_float32(folder: Path) -> None:
    learner = Learner(LearnerConfig(precision="bfloat16"), folder)
    learner.update(make_batch())
    assert {tensor.dtype for tensor in weight_tensors(learner.model).values()} == {torch.float32}


def test_a_penalty_in_the_reward_changes_advantages_and_not_the_loss(folder: Path) -> None:
    """Group-normalised, a constant reward has no advantage but what the penalty makes of it."""
    (row,) = make_batch()
    alike = with_floats(row, "rewards", dict.fromkeys(range(len(row.trajectory_ids)), 1.0))
    algorithm = AlgorithmConfig(proximal="behaviour", kl_coefficient=0.1, kl_in="reward", kl_kind="k2")
    metrics = Learner(LearnerConfig(algorithm=algorithm), folder).update([alike])
    assert metrics["kl/ref"] > 0
    assert metrics["batch/skipped_rows"] == 0
    assert metrics["advantage/abs_mean"] > 0


def test_metrics_say_what_the_batch_was(folder: Path) -> None:
    rows = make_batch(parts=2)
    batch = join_parts(rows)
    metrics = Learner(CONFIG, folder).update(rows)
    responses = batch.lengths - batch.prompt_lengths
    expected = {
        "reward/mean": batch.rewards.mean(),
        "reward/std": batch.rewards.std(),
        "response_length/mean": responses.mean(),
        "response_length/max": responses.max(),
        "response_length/clip_ratio": batch.truncated.mean(),
        "staleness/mean": batch.staleness.mean(),
        "staleness/max": 2,
        "batch/trajectories": 16,
        "batch/tokens": batch.lengths.sum(),
        "batch/trained_tokens": batch.trained.sum(),
        "learning_rate": 5e-3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    tokens, samples = (metrics[f"throughput/{name}_per_s"] * metrics["time/update"] for name in ("tokens", "samples"))
    assert (tokens, samples) == pytest.approx((batch.lengths.sum(), 16))
    ratios = {"importance_ratio/mean", "importance_ratio/max", "mismatch/kl", "mismatch/abs_mean", "mismatch/abs_max"}
    assert ratios <= set(metrics)
    assert 0 < metrics["ess"] < 1
    assert 0 < metrics["entropy"] < math.log(300)
    assert metrics["kl/mismatch"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def _rewards_alike_in_first_group(row: MicroBatch) -> dict[int, float]:
    return {index: 1.0 for index, name in enumerate(row.trajectory_ids) if name.startswith("p0.")}
