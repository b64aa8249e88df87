"""The learner: an update is the gradient of the formula, the same every time, and refuses what it cannot use."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from trainer_batches import make_batch, save_tiny_model, with_floats

from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors
from operators.trainer.algorithms import ALGORITHMS
from operators.trainer.batch import join
from operators.trainer.config import AlgorithmConfig, AlgorithmName, LearnerConfig
from operators.trainer.learner import Learner
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
    config = LearnerConfig(warmup_steps=0, micro_batch_tokens=64, max_gradient_norm=1e9)
    learner = Learner(config, folder)
    metrics = learner.update(rows)
    batch, model = join(rows), load_model(folder)
    losses, clipped = [], [0, 0]
    for row in range(len(batch)):
        tokens = slice(batch.starts[row], batch.starts[row] + batch.lengths[row])
        ids, mask = torch.from_numpy(batch.token_ids[tokens]), torch.from_numpy(batch.loss_mask[tokens])
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratios = (logprobs - torch.from_numpy(batch.behaviour[tokens])[1:]).exp()[mask[1:]]
        group = batch.rewards[batch.groups == batch.groups[row]]
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


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_trains(folder: Path, name: AlgorithmName) -> None:
    learner = Learner(LearnerConfig(algorithm=AlgorithmConfig(name=name, max_response_tokens=20)), folder)
    before = digest(learner)
    metrics = learner.update(make_batch())
    assert digest(learner) != before
    assert 0 < metrics["grad_norm"] < math.inf


def test_one_update_of_stale_data_has_all_of_its_correction_in_the_weight(folder: Path) -> None:
    """Decoupled, ρ = 1 throughout: nothing is clipped, and the weights are those of π_o/μ, truncated."""
    config = LearnerConfig(algorithm=AlgorithmConfig(name="decoupled_ppo", correction_cap=1.1))
    metrics = Learner(config, folder).update(make_batch())
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == (0, 0)
    assert metrics["importance_ratio/max"] > 1.1
    assert 0 < metrics["correction/weight_mean"] < 1.1
    assert metrics["correction/weight_mean"] < metrics["importance_ratio/mean"]


@pytest.mark.parametrize("name", ["grpo", "decoupled_ppo"])
def test_rows_without_advantage_are_skipped_at_no_difference(folder: Path, name: AlgorithmName) -> None:
    rows = [with_floats(row, "rewards", _rewards_alike_in_first_group(row)) for row in make_batch(parts=2)]
    config = LearnerConfig(algorithm=AlgorithmConfig(name=name, aggregation="token_mean"))
    skipping, whole = Learner(config, folder), Learner(config, folder)
    whole._rows_with_gradient = lambda batch, advantages: torch.arange(len(batch)).numpy()  # type: ignore[method-assign]
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


def test_metrics_say_what_the_batch_was(folder: Path) -> None:
    rows = make_batch(parts=2)
    batch = join(rows)
    metrics = Learner(CONFIG, folder).update(rows)
    responses = batch.lengths - batch.prompt_lengths
    expected = {
        "reward/mean": batch.rewards.mean(),
        "reward/std": batch.rewards.std(),
        "response_length/mean": responses.mean(),
        "response_length/max": responses.max(),
        "response_length/clip_ratio": 1.0,  # no response of these ends in a stop token
        "staleness/mean": batch.staleness.mean(),
        "staleness/max": 2,
        "batch/trajectories": 16,
        "batch/tokens": batch.lengths.sum(),
        "batch/trained_tokens": batch.trained.sum(),
        "learning_rate": 5e-3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert 0 < metrics["ess"] < 1
    assert 0 < metrics["entropy"] < math.log(300)
    assert metrics["kl/mismatch"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def _rewards_alike_in_first_group(row: MicroBatch) -> dict[int, float]:
    return {index: 1.0 for index, name in enumerate(row.trajectory_ids) if name.startswith("p0.")}
