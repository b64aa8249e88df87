"""The memory of a replica is computed, and compared with the free memory, before anything is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
from trainer_batches import save_tiny_model

import operators.rollout.model_backend as backends
from infra.models.checkpoint_folder import load_model
from infra.models.sizes import kv_values, readable_config
from infra.sizes import GIB
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate
from operators.rollout.forward_runner import kv_geometry
from operators.rollout.replica_memory import ReplicaMemory, check_vllm_memory, choose_slots, fitting_slots

QWEN_1_5B = ReplicaMemory(1_544_000_000, 2 * 28 * 2 * 128, "bfloat16")
QWEN_7B = ReplicaMemory(7_616_000_000, 2 * 28 * 4 * 128, "bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def free_on_gpu(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (size, size))


def test_kv_values_are_those_of_the_model(model: Path) -> None:
    layers, heads, size = kv_geometry(load_model(model))
    assert kv_values(readable_config(model)) == 2 * layers * heads * size
    assert kv_values({"n_layer": 3, "n_head": 4, "n_embd": 32}) == 2 * 3 * 32
    with pytest.raises(ValueError, match=r"config\.json has no numbers of layers"):
        kv_values({"hidden_size": 8})


@pytest.mark.parametrize(("memory", "slots"), [(QWEN_1_5B, 77), (QWEN_7B, 32)])
def test_defaults_fit_a_gpu_of_80_gb(memory: ReplicaMemory, slots: int) -> None:
    assert fitting_slots(memory, 32_768, int(0.9 * 79 * GIB), 1, "the GPU") == slots
    assert fitting_slots(memory, 4096, int(0.9 * 79 * GIB), 128, "the GPU") > 128


def test_slots_follow_the_free_memory_of_a_gpu_if_unset(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ReplicaMemory.of(model, "float32")
    assert memory is not None
    room_for_five = int((memory.weights + memory.kv(5 * 64)) / 0.9) + 100
    for free, slots in ((room_for_five, 5), (1 << 40, 128)):
        free_on_gpu(monkeypatch, free)
        assert choose_slots(RolloutConfig(context=64), model, torch.device("cuda")) == slots
    assert choose_slots(RolloutConfig(slots=7, context=64), model, torch.device("cuda")) == 7


@pytest.mark.parametrize(
    ("slots", "context", "says"),
    [
        (200, 64, r"200 of rollout\.context = 64 .* lower rollout\.slots to at most 5 or remove it, or .* most 1$"),
        (None, 2048, r"1 of rollout\.context = 2048 .* free: lower rollout\.context to at most 320$"),
    ],
)
def test_slots_beyond_the_memory_are_an_error_with_numbers(
    slots: int | None, context: int, says: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ReplicaMemory.of(model, "float32")
    assert memory is not None
    free_on_gpu(monkeypatch, int((memory.weights + memory.kv(5 * 64)) / 0.9) + 100)
    with pytest.raises(ValueError, match=rf"a replica needs .* KV .* for rollout\.slots = {says}"):
        choose_slots(RolloutConfig(slots=slots, context=context), model, torch.device("cuda"))


@pytest.mark.parametrize(("total", "permanent"), [(8 << 30, False), (2000, True)])
def test_backend_rejects_a_model_before_it_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, total: int, permanent: bool
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(backends, "empty_model", loaded.append)
    monkeypatch.setattr("operators.rollout.model_backend.load_tokenizer", lambda folder: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=total))
    backend = backends.TransformersBackend(RolloutConfig(), model, model / "store")
    with pytest.raises(ValueError, match=r"a replica's weights need .* but this machine has 1\.0 KiB free") as refusal:
        backend.engine()
    assert isinstance(refusal.value, CannotGenerate) == permanent
    assert not loaded


def test_memory_beyond_vllms_devices_is_a_permanent_error(model: Path) -> None:
    memory = ReplicaMemory.of(model, "float32")
    assert memory is not None
    kv = memory.kv(64)
    one, two = RolloutConfig(engine="vllm", context=64), RolloutConfig(engine="vllm", context=64, tensor_parallel=2)
    check_vllm_memory(one, model, memory.weights + kv)
    check_vllm_memory(two, model, memory.weights // 2 + kv)  # its one KV head is on both
    with pytest.raises(
        CannotGenerate, match=r"on each of its 2 devices .* one has .* raise rollout\.tensor_parallel, "
    ):
        check_vllm_memory(two, model, memory.weights // 2 + kv - 1)
    check_vllm_memory(RolloutConfig(engine="vllm", vllm={"quantization": "fp8"}), model, 0)
    check_vllm_memory(RolloutConfig(engine="vllm", vllm={"cpu_offload_gb": 4}), model, 0)
    small = replace(one, vllm={"kv_cache_dtype": "fp8"})
    check_vllm_memory(small, model, memory.weights + kv // 4)


def test_windows_and_compressed_kv_are_not_counted(model: Path, tmp_path: Path) -> None:
    memory, config = ReplicaMemory.of(model, "float32"), RolloutConfig(engine="vllm", context=64)
    assert memory is not None
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for more in ({"layer_types": ["sliding_attention"]}, {"kv_lora_rank": 8}):
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(readable_config(model) | more))
        check_vllm_memory(config, tmp_path, memory.weights)


def test_vllm_backend_checks_its_share_before_it_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, opened = ReplicaMemory.of(model, "float32"), []
    assert memory is not None
    needed = memory.weights + memory.kv(64)
    vllm = ModuleType("operators.rollout.vllm_engine")
    vllm.__dict__.update(device_memory=lambda: 2 * needed, VllmEngine=opened.append, open_vllm=lambda *a, **b: "vllm")
    monkeypatch.setitem(sys.modules, vllm.__name__, vllm)
    monkeypatch.setattr(backends, "load_tokenizer", lambda folder: None)
    backend = backends.VllmBackend(RolloutConfig(engine="vllm", context=64), model, model / "store")
    for share in (0.5, 0.49):
        monkeypatch.setattr(vllm, "memory_share", lambda config, share=share: share, raising=False)
        if share == 0.5:
            backend.engine()
            continue
        with pytest.raises(
            CannotGenerate, match=r"gpu_memory_utilization = 0\.49\): raise rollout\.tensor_parallel or"
        ):
            backend.engine()
    assert opened == ["vllm"]


def test_backend_without_its_gpus_cannot_generate(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "visible_gpus", lambda: ("0", "1"))
    with pytest.raises(CannotGenerate, match=r"rollout\.gpus has 4, but this machine has 2 GPUs"):
        backends.TransformersBackend(RolloutConfig(gpus=(4,)), model, model / "store")


def test_slots_that_a_gpu_will_have_are_no_permanent_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for total, permanent in ((80 << 30, False), (2000, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, total=total: (1000, total))
        with pytest.raises(ValueError, match="a replica needs") as refusal:
            choose_slots(RolloutConfig(context=64), model, torch.device("cuda"))
        assert isinstance(refusal.value, CannotGenerate) == permanent


def test_two_engines_of_a_replica_share_the_free_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ReplicaMemory.of(model, "float32")
    assert memory is not None
    free = int((2 * memory.weights + memory.kv(10 * 64)) / 0.9) + 200

    def engine(model: object, *, slots: int, **options: object) -> int:
        free_on_gpu(monkeypatch, free - memory.weights - memory.kv(slots * 64))
        return slots

    free_on_gpu(monkeypatch, free)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("allocate", "read_weights"):
        monkeypatch.setattr(backends, name, lambda *of: None)
    monkeypatch.setattr(backends, "TransformersEngine", engine)
    pair = backends.TransformersBackend(RolloutConfig(context=64), model, model / "store").engine_pair()
    assert tuple(pair) == (5, 5)
    with pytest.raises(ValueError, match=r"a replica needs .* but each half of the GPU .* has .* free: lower"):
        choose_slots(RolloutConfig(slots=6, context=64), model, torch.device("cuda"), 2)
