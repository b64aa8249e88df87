"""The memory of a rank: computed from a model's files, documented for the target set-ups, checked before loading."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from trainer_batches import save_tiny_model
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from infra.models.checkpoint_folder import load_model
from operators.trainer.assembly import CannotTrain
from operators.trainer.config import AlgorithmConfig, LearnerConfig, LoraConfig
from operators.trainer.memory_plan import (
    REMOTE_BYTES_PER_S,
    TARGETS,
    ModelShape,
    check_memory,
    offloaded_bytes,
    plan_memory,
    plan_rank,
    shape_of,
    shape_of_config,
)
from operators.trainer.rank_checks import check_device_memory
from operators.trainer.rank_training import RankTraining
from operators.trainer.training_config import TrainingConfig

SHAPE = ModelShape(10**9, 10**8, 10**7, 9, 1024, 4096, 10_000)
DENSE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
DOCUMENT = Path(__file__).parents[3] / "docs" / "training.md"


def test_shape_of_a_folder_counts_its_parameters(tmp_path: Path) -> None:
    shape = shape_of(save_tiny_model(tmp_path))
    model = load_model(tmp_path)
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    assert shape.largest_layer == sum(each.numel() for each in model.model.layers[0].parameters())
    assert shape.embedding == model.get_input_embeddings().weight.numel()
    assert shape.layers == 2


def test_shape_of_a_config_counts_the_model_it_describes() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    dense = Qwen2Config(**DENSE, intermediate_size=96, vocab_size=200, tie_word_embeddings=False)
    mixture = Qwen3MoeConfig(**DENSE, **experts, vocab_size=200, tie_word_embeddings=True)
    shared = Qwen2MoeConfig(**DENSE, **experts, shared_expert_intermediate_size=48, vocab_size=200)
    mixtral = MixtralConfig(**DENSE, intermediate_size=24, num_local_experts=4, vocab_size=200)
    olmoe = OlmoeConfig(**DENSE, intermediate_size=24, num_experts=4, num_experts_per_tok=2, vocab_size=200)
    kinds: dict[Any, Any] = {Qwen2ForCausalLM: dense, Qwen3MoeForCausalLM: mixture, Qwen2MoeForCausalLM: shared}
    kinds |= {MixtralForCausalLM: mixtral, OlmoeForCausalLM: olmoe}
    for kind, config in kinds.items():
        with torch.device("meta"):
            counted = sum(each.numel() for each in kind(config).parameters())
        # Biases and the norms of heads are left out.
        shape = shape_of_config(config.to_dict())
        assert shape.parameters == pytest.approx(counted, rel=0.01)
        assert shape.mlp_width == (96 if kind in (Qwen2ForCausalLM, Qwen2MoeForCausalLM) else 48)


def test_plan_divides_the_state_by_the_ranks() -> None:
    alone, four = (plan_memory(SHAPE, ranks, LearnerConfig()).parts for ranks in (1, 4))
    for part in ("weights", "gradients", "moments"):
        assert alone[part] == 4 * four[part]
    assert alone["weights"] + alone["gradients"] + alone["moments"] == 16 * SHAPE.parameters
    assert alone["gathered layers"] == 0 < four["gathered layers"]


def test_plan_counts_the_whole_model_if_layers_are_kept_gathered() -> None:
    kept = LearnerConfig(precision="bfloat16", keep_gathered=True)
    assert plan_memory(SHAPE, 8, kept).parts["gathered layers"] == 2 * SHAPE.parameters + 4 * SHAPE.largest_layer


@pytest.mark.parametrize(
    ("config", "part", "expected"),
    [
        (LearnerConfig(algorithm=AlgorithmConfig(name="ppo")), "critic", 4 * 10**9),
        (LearnerConfig(algorithm=AlgorithmConfig(name="ppo")), "gradients", 4 * 10**9),
        (LearnerConfig(algorithm=AlgorithmConfig(name="ppo"), lora=LoraConfig(rank=8)), "gradients", 4 * 10**9),
        (LearnerConfig(algorithm=AlgorithmConfig(name="ppo")), "critic's moments", 8 * 10**9),
        (LearnerConfig(algorithm=AlgorithmConfig(kl_coefficient=0.1)), "reference", 4 * 10**9),
        (
            LearnerConfig(algorithm=AlgorithmConfig(kl_coefficient=0.1), reference_dtype="bfloat16"),
            "reference",
            2 * 10**9,
        ),
        (LearnerConfig(lora=LoraConfig(rank=8)), "moments", 8 * 9 * 8 * (8 * 1024 + 3 * (1024 + 4096))),
        (LearnerConfig(precision="bfloat16"), "gathered layers", 2 * 10**9),
        (LearnerConfig(micro_batch_tokens=100), "logits", 100 * 10_000 * 12),
        (LearnerConfig(micro_batch_tokens=100, logits_chunk_tokens=10), "logits", 10 * 10_000 * 12),
    ],
)
def test_plan_counts_what_the_configuration_adds(config: LearnerConfig, part: str, expected: int) -> None:
    assert plan_memory(SHAPE, 1, config).parts[part] == expected


def test_offloaded_state_shares_its_memory_with_activations() -> None:
    algorithm = AlgorithmConfig(kl_coefficient=0.1)
    kept, offloaded = (
        plan_memory(SHAPE, 1, LearnerConfig(algorithm=algorithm, offload=offload)).parts
        for offload in ((), ("moments", "reference"))
    )
    transient = sum(kept[part] for part in ("gathered layers", "activations", "logits"))
    assert offloaded["moments"] == kept["moments"] - transient
    assert kept["reference"] - kept["activations"] < offloaded["reference"] < kept["reference"]
    assert {part for part in kept if kept[part] != offloaded[part]} == {"moments", "reference"}


def test_offloaded_moments_of_actor_and_critic_are_there_in_turn() -> None:
    learner = LearnerConfig(algorithm=AlgorithmConfig(name="ppo"), offload=("moments",), lora=LoraConfig(rank=8))
    parts = plan_memory(SHAPE, 1, learner).parts
    transient = sum(parts[part] for part in ("gathered layers", "activations", "logits"))
    assert (parts["moments"], parts["critic's moments"]) == (8 * 10**9 - transient, 0)  # the critic's are more
    on_gpu = TrainingConfig(learner=learner, device="cuda")
    assert offloaded_bytes(SHAPE, on_gpu) == 8 * 10**9 + 8 * 9 * 8 * (8 * 1024 + 3 * (1024 + 4096))


def test_rank_of_hybrid_sharding_holds_its_share_of_one_copy() -> None:
    copies = TrainingConfig(ranks=8, shard_ranks=2)
    assert plan_rank(SHAPE, copies) == plan_memory(SHAPE, 2, LearnerConfig())


def test_offloaded_state_is_in_host_memory_only_with_gpus() -> None:
    algorithm = AlgorithmConfig(kl_coefficient=0.1)
    learner = LearnerConfig(algorithm=algorithm, offload=("moments", "reference"))
    on_gpu, on_cpu = (TrainingConfig(learner=learner, ranks=4, device=device) for device in ("cuda", "cpu"))
    kept = plan_memory(SHAPE, 4, LearnerConfig(algorithm=algorithm))
    assert plan_rank(SHAPE, on_cpu) == kept
    assert plan_rank(SHAPE, on_gpu).total < kept.total
    assert offloaded_bytes(SHAPE, on_gpu) == kept.parts["moments"] + kept.parts["reference"]
    turns = TrainingConfig(learner=LearnerConfig(algorithm=algorithm, share_device=True), device="cuda")
    assert offloaded_bytes(SHAPE, turns) == (12 + 4) * SHAPE.parameters
    alone = TrainingConfig(learner=LearnerConfig(share_device=True), device="cuda")
    assert offloaded_bytes(SHAPE, alone) == 0


def test_models_that_share_a_device_need_the_largest_ones_memory() -> None:
    algorithm = AlgorithmConfig(name="ppo", kl_coefficient=0.1)
    kept, shared = (LearnerConfig(algorithm=algorithm, share_device=share) for share in (False, True))
    at_once, in_turn = (plan_memory(SHAPE, 1, each) for each in (kept, shared))
    assert at_once.total - in_turn.total == (12 + 4) * SHAPE.parameters  # of the critic and the reference
    config = TrainingConfig(learner=shared)
    assert plan_rank(SHAPE, config) == at_once  # a CPU has no other memory
    with pytest.raises(ValueError, match="share_device"):
        check_memory(at_once, in_turn.total, "cuda", replace(config, device="cuda", learner=kept))
    check_memory(in_turn, in_turn.total, "cuda", replace(config, device="cuda"))


def test_gradient_checkpointing_lowers_the_plan() -> None:
    kept, recomputed = (
        plan_memory(SHAPE, 1, LearnerConfig(gradient_checkpointing=again)).parts["activations"]
        for again in (False, True)
    )
    assert recomputed < kept / 4


def test_documented_set_ups_fit_their_gpus() -> None:
    rows = DOCUMENT.read_text().splitlines()
    for target in TARGETS:
        plan = target.plan()
        assert plan.total < 0.85 * 80 * 10**9, target.model
        numbers = [
            f"{size / 10**9:.1f}" for name, size in plan.parts.items() if not name.startswith(("critic", "reference"))
        ]
        cells = [target.model, str(target.nodes), str(target.ranks), *numbers, f"{plan.total / 10**9:.1f}"]
        assert f"| {' | '.join(cells)} |" in rows
        sent = target.remote_bytes
        seconds = [f"{sent / speed:.0f}" for speed in REMOTE_BYTES_PER_S]
        remote = target.ranks - target.ranks // target.nodes
        assert f"| {target.model} | {remote} | {sent / 10**9:.1f} | {' | '.join(seconds)} |" in rows


def test_too_little_memory_is_an_error_with_numbers_and_settings() -> None:
    config = TrainingConfig(ranks=2)
    plan = plan_rank(SHAPE, config)
    check_memory(plan, plan.total, "cpu", config)
    with pytest.raises(ValueError, match=r"needs \d+\.\d+ GiB \(moments 3\.7 GiB.*cpu has 1\.0 GiB.*ranks \(now 2\)"):
        check_memory(plan, 1 << 30, "cpu", config)


@pytest.mark.parametrize(
    ("changes", "learner", "advice", "useless"),
    [
        ({"ranks": 4}, {}, "raise trainer.ranks (now 4)", "shard_ranks"),
        ({"ranks": 16, "shard_ranks": 8}, {}, "raise trainer.shard_ranks (now 8)", "trainer.ranks"),
        ({"ranks": 8, "shard_ranks": 8}, {}, "raise trainer.ranks and trainer.shard_ranks (now 8)", "context_ranks"),
        ({"ranks": 4}, {"keep_gathered": True}, "unset trainer.learner.keep_gathered", "context_ranks"),
        ({"ranks": 1}, {"keep_gathered": True}, "raise trainer.ranks (now 1)", "keep_gathered"),
        ({"ranks": 4}, {}, "set trainer.learner.gradient_checkpointing", "offload"),
        ({"ranks": 4, "device": "cuda"}, {}, 'set trainer.learner.offload = ["moments"]', "share_device"),
        ({"ranks": 4, "device": "cuda"}, {"offload": ("moments",)}, "(now 1024)", "offload"),
        ({"ranks": 4}, {"gradient_checkpointing": True}, "lower trainer.learner.micro_batch_tokens (now 1024)", "set "),
    ],
)
def test_advice_names_settings_that_lower_the_plan(
    changes: dict[str, Any], learner: dict[str, Any], advice: str, useless: str
) -> None:
    config = TrainingConfig(**changes, learner=LearnerConfig(**learner))
    with pytest.raises(ValueError, match=re.escape(advice)) as raised:
        check_memory(plan_rank(SHAPE, config), 1 << 30, config.device, config)
    assert useless not in str(raised.value)


def test_plan_counts_a_sequence_longer_than_a_micro_batch() -> None:
    config = TrainingConfig(ranks=4, context_ranks=2)
    assert plan_rank(SHAPE, config, 2048) == plan_rank(SHAPE, config)  # two slices of 1024 tokens
    longer = plan_rank(SHAPE, config, 32_768)
    assert longer.parts["activations"] == 16 * plan_rank(SHAPE, config).parts["activations"]
    with pytest.raises(ValueError, match=r"context_ranks \(now 2\), which divide sequences of 32768") as raised:
        check_memory(longer, 1 << 30, "cpu", config, 32_768)
    assert "micro_batch_tokens" not in str(raised.value)


def test_training_rejects_sequences_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "model")
    fits = plan_rank(shape_of(model), TrainingConfig()).total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=fits, total=1 << 40))
    with pytest.raises(ValueError, match=r"a rank needs .*context_ranks \(now 1\)"):
        RankTraining(TrainingConfig(), model, tmp_path / "checkpoints", 1, longest=32_768)


@pytest.mark.parametrize(("total", "kind"), [(8 << 30, ValueError), (2000, CannotTrain)])
def test_training_rejects_a_model_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, kind: type[Exception]
) -> None:
    """Each start would fail again only if no other process can free enough."""
    model = save_tiny_model(tmp_path / "model")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=total))
    says = r"a rank needs .* but cpu has 1\.0 KiB free.*" + (
        r"only 2\.0 KiB in all$" if total == 2000 else r"memory`\)$"
    )
    with pytest.raises(kind, match=says):
        RankTraining(TrainingConfig(), model, tmp_path / "checkpoints", 1)


def test_ranks_of_two_machines_share_the_memory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "model")
    needed = plan_memory(shape_of(model), 4, LearnerConfig()).total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * needed, total=2 * needed))
    check_device_memory(model, TrainingConfig(ranks=4), "cpu", here=2)
    with pytest.raises(CannotTrain, match=r"but cpu \(a share of 4\) has"):
        check_device_memory(model, TrainingConfig(ranks=4), "cpu", here=4)


def test_offloaded_state_must_fit_the_memory_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What two ranks of one machine offload: for certain the tensors, and twice as much at most, as pinned memory."""
    model = save_tiny_model(tmp_path / "model")
    config = TrainingConfig(ranks=2, device="cuda", learner=LearnerConfig(offload=("moments",)))
    moments = 8 * shape_of(model).parameters
    host = SimpleNamespace(available=2 * moments, total=2 * moments)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 80 << 30))
    check_device_memory(model, config, "cuda:0", here=2)
    assert not caplog.messages
    host.available = moments
    check_device_memory(model, config, "cuda:0", here=2)
    assert re.search(r"2 ranks of .* in up to .* but it has .* free: take names out of .*offload", caplog.messages[0])
    for host.total, kind in ((2 * moments, ValueError), (moments - 2, CannotTrain)):
        host.available = moments - 2
        with pytest.raises(kind, match=r"2 ranks of machine .* will offload .*trainer\.learner\.offload"):
            check_device_memory(model, config, "cuda:0", here=2)
        check_device_memory(model, config, "cuda:0", here=1)
        check_device_memory(model, replace(config, learner=LearnerConfig()), "cuda:0", here=2)


def test_training_ends_for_good_without_weights(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(CannotTrain, match=r"the model in .* cannot be read: "):
        RankTraining(TrainingConfig(), model, tmp_path / "checkpoints", 1)


def test_training_rejects_a_model_for_a_gpu_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = save_tiny_model(tmp_path / "model"), list[str]()

    def mem_get_info(device: str) -> tuple[int, int]:
        asked.append(device)
        return 2000, 80 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    with pytest.raises(
        ValueError, match=r"a rank needs .* but cuda:3 has 2\.0 KiB free: raise trainer\.ranks \(now 1\)"
    ):
        RankTraining(TrainingConfig(device="cuda", gpus=(3,)), model, tmp_path / "checkpoints", 1)
    assert asked == ["cuda:3"]
