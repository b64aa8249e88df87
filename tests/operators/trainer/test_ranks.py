"""Ranks over gloo, each with its part of a batch, take the optimizer steps of one rank with the whole batch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from trainer_batches import TINY, save_experts, save_tiny_model
from two_ranks import BATCHES, LONG, TIMEOUT_S, continued, long_batch, parts, read, train, train_ranks

from infra.models.checkpoint_folder import load_tokenizer
from operators.trainer.adapter_folder import WEIGHTS, write_adapters
from operators.trainer.checkpoint_model import write_checkpoint_model
from operators.trainer.config import AlgorithmName, LearnerConfig, LoraConfig
from operators.trainer.learner import Learner
from operators.trainer.ranks import ALONE, Ranks

GRPO = {"name": "grpo", "correction_cap": 5.0}
SMALL = {
    "micro_batch_tokens": 48,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "algorithm": GRPO,
}
PPO = {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward"}
GSPO = {"name": "gspo", "kl_coefficient": 0.1}
Case = tuple[str, dict[str, Any], int, int]
CASES: dict[str, Case] = {
    "grpo": ("model", SMALL, 0, 1),
    "ppo": ("model", SMALL | {"algorithm": PPO, "mini_batches": 2}, 0, 1),
    "kept": ("model", SMALL | {"algorithm": PPO, "mini_batches": 2, "keep_gathered": True}, 0, 1),
    "lora": ("model", SMALL | {"lora": {"rank": 4}}, 0, 1),
    "experts": ("experts", SMALL, 0, 1),
    "two copies": ("model", SMALL | {"mini_batches": 2}, 1, 1),
    "context": ("model", SMALL | {"algorithm": PPO, "gradient_checkpointing": True}, 0, 2),
}
OF_FOUR: dict[str, Case] = {
    "context of four": ("experts", SMALL, 0, 4),
    "two contexts": ("experts", SMALL | {"algorithm": GSPO, "mini_batches": 2, "logits_chunk_tokens": 7}, 2, 2),
}
NAMES = list(CASES)
RESHARDED = ("ppo", "lora", "experts")
KLS = (None, ("loss", "k1"), ("reward", "k1"), ("loss", "k2"), ("reward", "k2"), ("loss", "k3"), ("reward", "k3"))
CORRECTIONS = (
    ("truncate", "sequence"),
    ("mask", "token"),
    ("none", "token"),
    ("mask", "sequence"),
    ("truncate", "token"),
)
COUNTS = ((1, 1), (2, 1), (1, 2), (2, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of two ranks."""
    made = tmp_path_factory.mktemp("ranks")
    save_tiny_model(made / "model")
    save_experts(made / "experts")
    return train_ranks(made, list(CASES.values()))


@pytest.mark.parametrize("case", NAMES)
def test_two_ranks_match_the_gradients_of_one(folder: Path, case: str) -> None:
    check(folder, NAMES.index(case), CASES[case])


@pytest.mark.slow
def test_four_ranks_in_context_groups_match_the_gradients_of_one(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    save_experts(tmp_path / "experts")
    train_ranks(tmp_path, list(OF_FOUR.values()), 4)
    for number, case in enumerate(OF_FOUR.values()):
        check(tmp_path, number, case, 4)
        _, metadata = read(tmp_path / f"0-{number}.safetensors")
        # A group with the same sequences; with two copies one across them and one of a copy, for policy and reference.
        assert json.loads(metadata["groups"]) == [TIMEOUT_S] * (3 if case[2] else 1)
        assert json.loads(metadata["default"]) == TIMEOUT_S


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_ranks_continue_from_a_checkpoint_alike(tmp_path: Path) -> None:
    """Of a critic, adapters and a mixture of experts: of four ranks, by one, two and eight."""
    save_tiny_model(tmp_path / "model")
    save_experts(tmp_path / "experts")
    cases = [CASES[name] for name in RESHARDED]
    train_ranks(tmp_path, cases, 4)
    for ranks in (2, 8):
        train_ranks(tmp_path, cases, ranks, "reshard")
    for number, name in enumerate(RESHARDED):
        config = TypeAdapter(LearnerConfig).validate_json(json.dumps(CASES[name][1]))
        expected, metrics = continued(config, ALONE, tmp_path, CASES[name][0], number)
        for ranks in (2, 8):
            found, of_these = read(tmp_path / f"resharded-{ranks}-{number}.safetensors")
            assert found.keys() == expected.keys(), name
            for key, tensor in expected.items():
                apart = (found[key].double() - tensor.double()).norm()
                assert apart <= 1e-4 * tensor.double().norm() + 1e-4, (name, ranks, key)
            loss = json.loads(of_these["metrics"])["loss"]
            assert loss == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6), (name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_ranks_match_one_with_a_long_sequence(tmp_path: Path, ranks: int) -> None:
    """Of 32,768 tokens, of which each rank has its share."""
    save_tiny_model(tmp_path / "model", shape=replace(TINY, layers=1, heads=4, kv_heads=4, max_positions=LONG))
    values = SMALL | {"micro_batch_tokens": LONG, "logits_chunk_tokens": 2048, "gradient_checkpointing": True}
    train_ranks(tmp_path, [("model", values, 0, ranks)], ranks, "long")
    config = TypeAdapter(LearnerConfig).validate_json(json.dumps(values))
    expected, metrics = train(Learner(config, tmp_path / "model"), [[long_batch()]])
    found, metadata = read(tmp_path / f"long-{ranks}-0.safetensors")
    one, other = (flat(tensors, "gradient.0.") for tensors in (found, expected))
    assert (one - other).norm() <= 1e-4 * other.norm()
    (of_ranks,) = json.loads(metadata["metrics"])
    assert of_ranks["batch/tokens"] == metrics[0]["batch/tokens"] > 0.8 * LONG
    assert of_ranks["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-4, abs=1e-6)


def test_router_auxiliary_loss_has_no_gradient(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    save_experts(tmp_path / "experts")
    config = TypeAdapter(LearnerConfig).validate_json(json.dumps(SMALL))
    file, found = tmp_path / "experts" / "config.json", []
    for wanted in (False, True):
        shape = json.loads(file.read_text()) | {"output_router_logits": wanted, "router_aux_loss_coef": 10.0}
        file.write_text(json.dumps(shape))
        learner = Learner(config, tmp_path / "experts")
        assert learner.model.config.output_router_logits == wanted
        found.append(train(learner, [[row for rank in parts(0) for row in rank]])[0])
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.soak
def test_two_ranks_match_one_with_every_algorithm_and_kl(tmp_path: Path) -> None:
    cases = list(every_case())
    save_tiny_model(tmp_path / "model")
    train_ranks(tmp_path, cases)
    for number, case in enumerate(cases):
        check(tmp_path, number, case)


def every_case() -> Iterator[Case]:
    """Algorithms × KL; corrections, mini-batches and epochs alternate."""
    for number, (name, kl) in enumerate(itertools.product(get_args(AlgorithmName), KLS)):
        kind, level = CORRECTIONS[number % 5]
        algorithm = {"name": name, "max_response_tokens": 25, "correction": kind, "correction_level": level}
        if kl:
            algorithm |= {"kl_coefficient": 0.2, "kl_in": kl[0], "kl_kind": kl[1]}
        mini_batches, epochs = COUNTS[number % 4]
        yield "model", SMALL | {"algorithm": algorithm, "mini_batches": mini_batches, "epochs": epochs}, 0, 1


def check(folder: Path, number: int, case: Case, ranks: int = 2) -> None:
    """Compare the results of `ranks` ranks for the case `number` with one rank."""
    model, values, _, _ = case
    config = TypeAdapter(LearnerConfig).validate_json(json.dumps(values))
    batches = [[row for rank in parts(each) for row in rank] for each in range(BATCHES)]
    expected, metrics = train(Learner(config, folder / model), batches)
    for rank in range(ranks):
        found, metadata = read(folder / f"{rank}-{number}.safetensors")
        assert set(found) == set(expected), values
        for name, tensor in expected.items():
            # 1e-4 is a tenth of a step: AdamW takes full steps for gradients near rounding error, such as those of
            # the key biases, and processors round differently. Gradients have narrower bounds below.
            assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-4, (values, name)
        for batch in range(BATCHES):
            one, other = (flat(tensors, f"gradient.{batch}.") for tensors in (found, expected))
            bound = 1e-4 if batch else 1e-5  # after a step the weights differ by its rounding
            assert (one - other).norm() <= bound * other.norm(), values
        assert metadata["resumed"] == "true"
        for ours, theirs in zip(metrics, json.loads(metadata["metrics"]), strict=True):
            known = {name: ours[name] for name in ours if not name.startswith(("time/", "throughput/"))}
            assert {name: theirs[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-6), values


def test_ranks_that_keep_layers_gather_them_once_a_step(folder: Path) -> None:
    found = {case: read(folder / f"0-{NAMES.index(case)}.safetensors")[1] for case in ("ppo", "kept")}
    # Actor and critic take two steps of several micro-batches, and score the batch before; the reference scores it.
    assert 0 < int(found["kept"]["gatherings"]) < int(found["ppo"]["gatherings"]) / 2
    assert found["kept"]["gathered models"] == "1"  # the plan of memory has one


def test_ranks_of_a_further_copy_write_no_tensors(folder: Path) -> None:
    sizes = {
        case: [
            (folder / f"checkpoint-{NAMES.index(case)}" / f"rank-{rank}-of-2.safetensors").stat().st_size
            for rank in range(2)
        ]
        for case in ("grpo", "two copies")
    }
    assert sizes["two copies"][1] < 1000 < sizes["grpo"][1]
    assert sizes["two copies"][0] == pytest.approx(sum(sizes["grpo"]), rel=0.1)


def test_ranks_publish_experts_under_the_names_of_a_checkpoint(folder: Path) -> None:
    published, _ = read(folder / f"0-{NAMES.index('experts')}.safetensors")
    names = {name.removeprefix("published.") for name in published if name.startswith("published.")}
    with safe_open(folder / "experts" / "model.safetensors", framework="pt") as saved:
        assert names == set(saved.keys())


@pytest.mark.parametrize("case", ["grpo", "lora", "experts"])
def test_model_of_a_checkpoint_of_two_ranks_is_as_published(folder: Path, tmp_path: Path, case: str) -> None:
    (model, values, _, _), number = CASES[case], NAMES.index(case)
    lora = LoraConfig(**values.get("lora", {}))
    load_tokenizer(folder / "model").save_pretrained(folder / model)
    write_checkpoint_model(folder / f"checkpoint-{number}", lora, folder / model, tmp_path / "out")
    written, _ = read(tmp_path / "out" / "model.safetensors")
    published = of_kind(read(folder / f"0-{number}.safetensors")[0], "published.")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in published.items())


def test_adapters_of_a_checkpoint_of_two_ranks_are_whole(folder: Path, tmp_path: Path) -> None:
    number = NAMES.index("lora")
    write_adapters(folder / f"checkpoint-{number}", LoraConfig(rank=4), folder / "model", tmp_path, "1.2")
    written, _ = read(tmp_path / WEIGHTS)
    trained = of_kind(read(folder / f"0-{number}.safetensors")[0], "weights.")
    expected = {f"base_model.model.{name.replace('.default', '')}": tensor for name, tensor in trained.items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def of_kind(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}


def flat(tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return torch.cat([tensor.flatten() for name, tensor in sorted(tensors.items()) if name.startswith(prefix)])


def test_ranks_know_their_copy_and_their_sequences() -> None:
    """Four ranks: two copies of the model, and two groups with different sequences."""
    ranks = [Ranks(rank, 4, shards=2, context=2) for rank in range(4)]
    assert [each.of_first_copy for each in ranks] == [True, True, False, False]
    assert [each.of_data() for each in ranks] == [Ranks(rank, 2, stride=2) for rank in (0, 0, 1, 1)]
    assert Ranks(3, 4).of_first_copy
    assert Ranks(3, 4).of_data() == Ranks(3, 4)


def test_numbers_of_ranks_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks().total([1.0, 2.0]) == [1.0, 2.0]
    monkeypatch.setattr(Ranks, "gather", lambda self, values: [values, 10 * values])
    assert Ranks(1, 2).total([1.0, 2.0]) == [11.0, 22.0]
    assert (Ranks(1, 2).maximum(3.0), Ranks().maximum(3.0)) == (30.0, 3.0)
