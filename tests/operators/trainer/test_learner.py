"""The learner: gradients match the formula, updates are deterministic, invalid data are rejected."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from optimizer_steps import record_steps
from trainer_batches import make_batch, save_tiny_model, with_floats

from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors
from operators.trainer import trained_model
from operators.trainer.batch import join_parts
from operators.trainer.config import AlgorithmConfig, AlgorithmName, CriticConfig, KlPlace, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.packing import mini_batches
from operators.trainer.presets import PRESETS
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


def test_gradient_matches_the_formula(folder: Path) -> None:
    """GRPO computed one sequence at a time by the model's own forward: stale data, clipping, all rows."""
    rows = make_batch(parts=2)
    against_rollouts = AlgorithmConfig(name="grpo", clip_high=0.28, proximal="behaviour", correction="none")
    config = LearnerConfig(warmup_steps=0, micro_batch_tokens=64, max_gradient_norm=1e9, algorithm=against_rollouts)
    learner = Learner(config, folder)
    gradients = clipped_gradients(learner)
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
    for gradient, name in zip(gradients, dict(learner.model.named_parameters()), strict=True):
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * norm, rtol=1e-3)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_gradient_is_independent_of_micro_batch_size(folder: Path, name: AlgorithmName) -> None:
    algorithm = AlgorithmConfig(name=name, kl_coefficient=0.1)
    gradients = []
    for budget in (10**6, 1000, 40, 1):
        config = LearnerConfig(algorithm=algorithm, micro_batch_tokens=budget, max_gradient_norm=1e9)
        learner = Learner(config, folder)
        trained = [learner._actor, *([learner._critic_trained] if learner._critic else [])]
        steps = [record_steps(model) for model in trained]
        learner.update(make_batch(parts=2))
        gradients.append([torch.cat([each.flatten() for each in taken[-1].gradient.values()]) for taken in steps])
    whole, *split = gradients
    for parts in split:
        for one, other in zip(parts, whole, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()
            assert other.norm() > 1e-3


def clipped_gradients(learner: Learner) -> list[torch.Tensor]:
    """A list to which the policy's gradients are added at each of its optimizer steps, after which they are cleared."""
    found: list[torch.Tensor] = []
    learner.before_change = lambda: found.extend(p.grad.clone() for p in learner.model.parameters())
    return found


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_algorithm_trains(folder: Path, name: AlgorithmName) -> None:
    learner = Learner(LearnerConfig(algorithm=AlgorithmConfig(name=name, max_response_tokens=20)), folder)
    before = digest(learner)
    metrics = learner.update(make_batch())
    assert digest(learner) != before
    assert 0 < metrics["grad_norm"] < math.inf


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"cispo", "icepop"}))
def test_stale_update_has_its_correction_in_the_weight(folder: Path, name: AlgorithmName) -> None:
    """Decoupled: ρ = 1, so nothing is clipped, and the weights are truncated π_o/μ."""
    algorithm = AlgorithmConfig(name=name, correction_cap=1.1, max_response_tokens=20)
    config = LearnerConfig(algorithm=algorithm, mini_batches=1)
    metrics = Learner(config, folder).update(make_batch())
    assert not {"clip_ratio/low", "clip_ratio/high"} & set(metrics)  # no ratio differs from 1: not applicable
    assert metrics["importance_ratio/max"] > 1.1
    assert 0 < metrics["correction/weight_mean"] < 1.1
    assert metrics["correction/weight_mean"] < metrics["importance_ratio/mean"]


@pytest.mark.parametrize("name", ["grpo", "decoupled_ppo"])
def test_skipping_zero_advantage_rows_keeps_the_gradient(folder: Path, name: AlgorithmName) -> None:
    rows = [with_floats(row, "rewards", _rewards_alike_in_first_group(row)) for row in make_batch(parts=2)]
    config = LearnerConfig(algorithm=AlgorithmConfig(name=name, aggregation="token_mean"))
    skipping, whole = Learner(config, folder), Learner(config, folder)
    whole._rows_with_gradient = lambda batch, targets: torch.arange(len(batch)).numpy()  # type: ignore[method-assign]
    gradients = clipped_gradients(skipping), clipped_gradients(whole)
    few, all_ = skipping.update(rows), whole.update(rows)
    assert few["batch/skipped_rows"] >= 4
    assert all_["batch/skipped_rows"] == 0
    assert few["loss"] == pytest.approx(all_["loss"], abs=1e-6)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6 * few["grad_norm"], rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_same_batches_give_bit_identical_weights(folder: Path, threads: int) -> None:
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


def test_invalid_data_leave_the_learner_unchanged(folder: Path) -> None:
    learner = Learner(CONFIG, folder)
    before = digest(learner)
    (row,) = make_batch()
    with pytest.raises(ValueError, match=row.trajectory_ids[1]):
        learner.update([with_floats(row, "rewards", {1: math.nan})])
    assert (digest(learner), learner.updates) == (before, 0)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_unknown_tokens_leave_the_learner_unchanged(folder: Path, token: int) -> None:
    learner = Learner(CONFIG, folder)
    before = digest(learner)
    (row,) = make_batch()
    ids = row.token_ids.to_numpy().copy()
    ids[row.lengths.to_numpy()[0]] = token
    with pytest.raises(ValueError, match=rf"{row.trajectory_ids[1]} has a token id outside the model's vocabulary"):
        learner.update([replace(row, token_ids=columns.token_ids(ids))])
    assert (digest(learner), learner.updates) == (before, 0)


def test_sequence_above_the_token_budget_is_trained_alone(folder: Path) -> None:
    config = LearnerConfig(micro_batch_tokens=2, max_gradient_norm=1e9)
    long, short = Learner(config, folder), Learner(LearnerConfig(max_gradient_norm=1e9), folder)
    assert long.update(make_batch())["grad_norm"] == pytest.approx(short.update(make_batch())["grad_norm"], rel=1e-4)


def test_nonfinite_gradient_is_skipped_and_counted(folder: Path) -> None:
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


def test_padded_vocabulary_is_trained(tmp_path: Path) -> None:
    """Embeddings may be padded for speed: token ids beyond the tokenizer have a probability and can be sampled."""
    model, known = load_model(save_tiny_model(tmp_path / "small")), 300
    model.resize_token_embeddings(known + 20, mean_resizing=False)
    model.save_pretrained(tmp_path / "model")
    learner = Learner(CONFIG, tmp_path / "model")
    (row,) = make_batch()
    ids = row.token_ids.to_numpy().copy()
    ids[row.lengths.to_numpy()[0] - 1] = known + 15
    assert math.isfinite(learner.update([replace(row, token_ids=columns.token_ids(ids))])["grad_norm"])


def test_batch_of_equal_rewards_is_valid(folder: Path) -> None:
    (row,) = make_batch()
    alike = with_floats(row, "rewards", dict.fromkeys(range(len(row.trajectory_ids)), 1.0))
    metrics = Learner(CONFIG, folder).update([alike])
    assert (metrics["batch/skipped_rows"], metrics["grad_norm"]) == (16, 0)
    assert metrics["frac_reward_zero_std"] == 1


def test_gradient_is_clipped_to_max_norm(folder: Path) -> None:
    learner = Learner(LearnerConfig(max_gradient_norm=1e-3), folder)
    gradients = clipped_gradients(learner)
    assert learner.update(make_batch())["grad_norm"] > 1e-2
    norm = math.sqrt(sum(float((each**2).sum()) for each in gradients))
    assert norm == pytest.approx(1e-3, rel=1e-2)


def test_kl_penalty_keeps_the_policy_near_the_reference(folder: Path) -> None:
    drift = {}
    for coefficient in (0.001, 10.0):
        config = LearnerConfig(learning_rate=3e-3, algorithm=AlgorithmConfig(kl_coefficient=coefficient))
        learner = Learner(config, folder)
        (row,) = make_batch()
        values = [learner.update([row])["kl/ref"] for _ in range(8)]
        assert values[0] == pytest.approx(0, abs=1e-6)
        drift[coefficient] = values[-1]
    assert 0 < drift[10.0] < 0.5 * drift[0.001]


def test_several_steps_clip_against_the_initial_policy(folder: Path) -> None:
    """Decoupled: with one step ρ = 1; with several steps π differs from π_o and is clipped against it."""
    algorithm = AlgorithmConfig(name="decoupled_ppo", clip_low=0.01, clip_high=0.01)
    config = LearnerConfig(algorithm=algorithm, learning_rate=1e-2, warmup_steps=0, mini_batches=2, epochs=2)
    learner = Learner(config, folder)
    metrics = learner.update(make_batch())
    assert metrics["clip_ratio/low"] > 0
    assert metrics["clip_ratio/high"] > 0
    assert {int(value) for name, value in learner.state().moments.items() if name.startswith("step.")} == {4}


def test_mini_batches_are_whole_groups() -> None:
    groups = np.array([0, 1, 2, 0, 1, 2, 3, 4])
    found = mini_batches(groups, 2)
    assert [sorted(set(groups[rows])) for rows in found] == [[0, 1, 2], [3, 4]]
    assert sorted(np.concatenate(found)) == list(range(8))
    assert len(mini_batches(groups, 9)) == 5


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_ppo_critic_learns_returns(folder: Path, kl: float) -> None:
    """Values trained repeatedly on one batch explain its returns; a resumed learner is bit-identical."""
    algorithm = AlgorithmConfig(name="ppo", kl_coefficient=kl, kl_in="reward", kl_kind="k1")
    config = LearnerConfig(algorithm=algorithm, warmup_steps=0, critic=CriticConfig(learning_rate=1e-2, value_clip=9.0))
    learner = Learner(config, folder)
    metrics = [learner.update(make_batch()) for _ in range(10)]
    assert metrics[0]["critic/explained_variance"] == 0  # every value is 0 at first
    assert metrics[-1]["critic/explained_variance"] > 0.5
    assert metrics[-1]["critic/loss"] < 0.5 * metrics[0]["critic/loss"]
    assert ("kl/ref" in metrics[0]) is (kl > 0)
    assert {"time/actor_use", "time/critic_use"} <= set(metrics[0])


def test_critic_warmup_trains_the_critic_alone(folder: Path) -> None:
    config = LearnerConfig(algorithm=AlgorithmConfig(name="ppo"), critic=CriticConfig(warmup_batches=1))
    learner = Learner(config, folder)
    before = digest(learner)
    metrics = learner.update(make_batch())
    assert "loss" not in metrics
    assert metrics["learning_rate"] == 0
    assert digest(learner) == before
    metrics = learner.update(make_batch())
    assert "loss" in metrics
    assert metrics["learning_rate"] == config.learning_rate / config.warmup_steps  # its schedule begins here
    assert digest(learner) != before


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_critic_warmup_scores_for_the_reward_alone(folder: Path, kl_in: KlPlace) -> None:
    algorithm = AlgorithmConfig(name="ppo", kl_coefficient=0.1, kl_in=kl_in)
    learner = Learner(LearnerConfig(algorithm=algorithm, critic=CriticConfig(warmup_batches=1)), folder)
    used = {"time/actor_use", "time/reference_use"}
    assert used & learner.update(make_batch()).keys() == (used if kl_in == "reward" else set())
    assert used <= learner.update(make_batch()).keys()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_share_device_does_not_change_weights(folder: Path, name: AlgorithmName) -> None:
    digests = set()
    for share in (False, True):
        algorithm = AlgorithmConfig(name=name, kl_coefficient=0.1)
        learner = Learner(LearnerConfig(algorithm=algorithm, share_device=share), folder)
        for number in range(2):
            metrics = learner.update(make_batch(seed=number))
        digests.add(digest(learner))
        assert ("time/reference_load" in metrics) is share
        assert ("time/actor_offload" in metrics) is share
        assert ("time/critic_offload" in metrics) is (share and name == "ppo")
    assert len(digests) == 1


def test_model_that_is_alone_shares_the_device_with_nobody(folder: Path) -> None:
    learner = Learner(LearnerConfig(share_device=True), folder)
    assert "time/actor_offload" not in learner.update(make_batch())


def test_offload_moves_the_reference_and_changes_no_weights(folder: Path) -> None:
    digests = set()
    for offload in ((), ("moments", "reference")):
        algorithm = AlgorithmConfig(kl_coefficient=0.1)
        learner = Learner(LearnerConfig(algorithm=algorithm, offload=offload), folder)
        for number in range(2):
            metrics = learner.update(make_batch(seed=number))
        digests.add(digest(learner))
        assert ("time/reference_load" in metrics) is bool(offload)
        assert "time/actor_load" not in metrics
    assert len(digests) == 1


def test_offloaded_moments_are_on_the_device_for_a_step_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(LearnerConfig(offload=("moments",)), folder)
    host, seen = torch.device("meta"), list[object]()  # on a CPU both would be the same
    monkeypatch.setattr(trained_model, "HOST", host)
    monkeypatch.setattr(trained_model, "move_state", lambda _, device: seen.append(device))
    learner.before_change = lambda: seen.append("change")
    learner.update(make_batch())
    assert seen == ["change", torch.device("cpu"), host]
    learner.restore(learner.state())
    assert seen[3:] == [host]


def test_gradient_checkpointing_keeps_the_gradient(folder: Path) -> None:
    gradients = {}
    for again in (False, True):
        learner = Learner(LearnerConfig(gradient_checkpointing=again), folder)
        runs = []
        for layer in learner.model.base_model.layers:
            layer.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
            layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(2))
        gradients[again] = clipped_gradients(learner)
        learner.update(make_batch())
        assert runs.count(2) == (2 if again else 1) * runs.count(1)
        assert not any(module.training for module in learner.model.modules())
    for one, other in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_bfloat16_precision_keeps_float32_weights(folder: Path) -> None:
    learner = Learner(LearnerConfig(precision="bfloat16"), folder)
    learner.update(make_batch())
    assert {tensor.dtype for tensor in weight_tensors(learner.model).values()} == {torch.float32}


def test_kl_in_reward_changes_advantages_not_the_loss(folder: Path) -> None:
    """With group normalisation a constant reward has only the advantage of the penalty."""
    (row,) = make_batch()
    alike = with_floats(row, "rewards", dict.fromkeys(range(len(row.trajectory_ids)), 1.0))
    algorithm = AlgorithmConfig(proximal="behaviour", kl_coefficient=0.1, kl_in="reward", kl_kind="k2")
    metrics = Learner(LearnerConfig(algorithm=algorithm), folder).update([alike])
    assert metrics["kl/ref"] > 0
    assert metrics["batch/skipped_rows"] == 0
    assert metrics["advantage/abs_mean"] > 0


def test_metrics_describe_the_batch(folder: Path) -> None:
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
    assert metrics["mismatch/above_bound"] == 1  # the logprobs are random
    assert "kl/ref" not in metrics
    assert 0 < metrics["ess"] < 1
    assert 0 < metrics["entropy"] < math.log(300)
    assert metrics["kl/mismatch"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def _rewards_alike_in_first_group(row: MicroBatch) -> dict[int, float]:
    return {index: 1.0 for index, name in enumerate(row.trajectory_ids) if name.startswith("p0.")}
