"""The vLLM engine against the transformers engine, its weights, its two samplers, and its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tiny_engines import engine, mixed, plain_logprobs, request, run
from tiny_models import tiny_model
from transformers import PreTrainedModel
from vllm_engines import FAMILY, MIXTURE, model_folder, vllm_engine

from infra.models.weights import save_weights
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate, Completion, Request
from operators.rollout.model_backend import VllmBackend
from operators.rollout.vllm_options import argument_names
from schemas.records import PolicyVersion, TokenSampler

pytest.importorskip("vllm", reason="make vllm-test has it")

from operators.rollout import vllm_worker


def test_vllm_draws_the_tokens_of_the_transformers_engine() -> None:
    asked = mixed(24)
    ours, theirs = run(engine(FAMILY), asked), run(vllm_engine(), asked)
    for one in asked:
        mine, other = ours[one.trajectory_id], theirs[one.trajectory_id]
        assert mine.generated.token_ids.tolist() == other.generated.token_ids.tolist()
        assert np.abs(mine.generated.logprobs - other.generated.logprobs).max() < 1e-4
        assert mine.finish_reason == other.finish_reason


def test_vllm_resumes_a_trajectory_of_the_transformers_engine() -> None:
    asked = mixed(6)
    whole, source = run(engine(FAMILY), asked), engine(FAMILY)
    for one in asked:
        source.submit(one)
    done = {each.trajectory_id for _ in range(3) for each in source.step()}
    released = source.release([one.trajectory_id for one in asked])
    left = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id in released]
    resumed = run(vllm_engine(), left)
    assert done | resumed.keys() == whole.keys()
    for name, completion in resumed.items():
        assert completion.generated.token_ids.tolist() == whole[name].generated.token_ids.tolist()


@pytest.mark.parametrize("token_sampler", ["laminar", "vllm"])
def test_vllm_schedules_a_step_while_another_runs(token_sampler: TokenSampler) -> None:
    it = vllm_engine(token_sampler=token_sampler, asynchronous=True)
    core = it._vllm.engine_core.engine_core  # type: ignore[attr-defined]
    it.submit(request(0))
    assert (list(it.step()), len(core.batch_queue)) == ([], 1)  # the first step runs
    it.step()
    assert len(core.batch_queue) == 1
    assert len(it.generated({"p0.0": 0})["p0.0"].token_ids) == 1
    it.release(["p0.0"])
    it.load(model_folder(FAMILY) / "model.safetensors", PolicyVersion(1, 1))
    assert not core.batch_queue


def test_sampler_of_vllm_refuses_temperatures_it_would_raise() -> None:
    it = vllm_engine(token_sampler="vllm", asynchronous=True)
    with pytest.raises(
        ValueError, match=r"'p0\.0': vLLM's sampler draws at .* 0\.01, not 0\.005: set rollout\.token_s"
    ):
        it.submit(request(0, temperature=0.005))
    assert it.status().waiting == 0
    vllm_engine().submit(request(0, temperature=0.005))


@pytest.mark.parametrize("family", [FAMILY, "qwen3_tied", MIXTURE])
def test_vllm_loads_weights_as_on_a_gpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own reload, which CPUs need only for layers that `_load_packed` does not support."""
    for seed in (1, 2):
        save_weights(tiny_model(family, seed), tmp_path / f"w{seed}")
    monkeypatch.setattr(vllm_worker, "_UNQUANTIZED", set())
    it, asked = vllm_engine(family, slots=7), mixed(9)  # no other test loads into an engine with 7 slots
    for seed in (1, 2):
        it.load(tmp_path / f"w{seed}", PolicyVersion(1, seed))
        assert_logprobs_of(tiny_model(family, seed), asked, run(it, asked))


def test_vllm_load_resets_the_prefix_cache(tmp_path: Path) -> None:
    save_weights(tiny_model(FAMILY, seed=1), tmp_path / "w")
    asked = [request(i, new=12, prompt=40) for i in range(3)]
    it = vllm_engine()
    before = run(it, asked)
    it.load(tmp_path / "w", PolicyVersion(1, 1))
    ours = engine(FAMILY)
    ours.load(tmp_path / "w", PolicyVersion(1, 1))
    after, expected = run(it, asked), run(ours, asked)
    for name in expected:
        assert after[name].generated.token_ids.tolist() == expected[name].generated.token_ids.tolist()
    assert any(before[name].generated.token_ids.tolist() != after[name].generated.token_ids.tolist() for name in after)


def test_vllm_backend_rejects_a_model_that_no_device_can_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from operators.rollout import vllm_engine as module

    assert module.device_memory() > 1 << 30
    monkeypatch.setattr(module, "device_memory", lambda: 1)
    monkeypatch.setattr("operators.rollout.model_backend.load_tokenizer", lambda folder: None)
    backend = VllmBackend(RolloutConfig(engine="vllm"), model_folder(FAMILY), tmp_path)
    with pytest.raises(CannotGenerate, match=r"on each of its 1 device .* one has"):
        backend.engine()


def test_vllm_uses_a_share_of_a_gpu_unless_kv_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from operators.rollout import vllm_engine as module

    utilization = {"gpu_memory_utilization": 0.85}
    assert module.memory_share(RolloutConfig(engine="vllm", vllm=utilization)) == 1
    monkeypatch.setattr(module.current_platform, "is_cpu", lambda: False)
    assert module.memory_share(RolloutConfig(engine="vllm", vllm=utilization)) == 0.85
    assert 0.5 < module.memory_share(RolloutConfig(engine="vllm")) < 1
    assert module.memory_share(RolloutConfig(engine="vllm", vllm=utilization, kv_capacity=4096)) == 1


def test_vllm_rejects_compiled_code_on_a_cpu() -> None:
    from operators.rollout.vllm_engine import open_vllm

    with pytest.raises(CannotGenerate, match="enforce_eager must be true on a CPU"):
        open_vllm(model_folder(FAMILY), slots=2, context=64, enforce_eager=False)


def test_vllm_rejects_options_that_it_does_not_have() -> None:
    from vllm import EngineArgs

    from operators.rollout.vllm_engine import engine_arguments

    with pytest.raises(CannotGenerate, match="did you mean 'quantization'"):
        engine_arguments(model_folder(FAMILY), slots=2, context=64, quantisation="fp8")
    assert argument_names() == {each.name for each in fields(EngineArgs)}


def test_vllm_kv_capacity_is_in_blocks_of_the_given_size() -> None:
    from operators.rollout.vllm_engine import engine_arguments

    found = engine_arguments(model_folder(FAMILY), slots=2, context=64, block_size=16)
    assert (found["block_size"], found["num_gpu_blocks_override"]) == (16, 2 * 64 // 16 + 1)


def test_vllm_does_not_leave_ld_preload() -> None:
    vllm_engine()
    assert "tcmalloc" not in os.environ.get("LD_PRELOAD", "")


@pytest.mark.parametrize(("end", "token_sampler"), [("closed", "laminar"), ("killed", "vllm")])
def test_vllm_workers_end_with_their_engine(end: str, token_sampler: TokenSampler, tmp_path: Path) -> None:
    """They generate the tokens of one worker, and each reads its half of the weights alone, beside the norms."""
    save_weights(tiny_model("wide", seed=1), tmp_path / "w")
    script = Path(__file__).with_name("vllm_two_workers.py")
    arguments = [str(model_folder("wide")), str(tmp_path / "w"), token_sampler]
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # for the sockets of the workers
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            reported = json.loads(next(line for line in process.stdout if line.startswith("{")))
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= 2
            if end == "killed":
                process.kill()
            process.stdin.close()
            assert process.wait(60) == (0 if end == "closed" else -signal.SIGKILL)
            _, left = psutil.wait_procs(started, timeout=30)
            assert not left
        finally:
            process.kill()
    ours = engine("wide") if token_sampler == "laminar" else vllm_engine("wide", token_sampler=token_sampler)
    ours.load(tmp_path / "w", PolicyVersion(1, 1))
    shares = [copied / (tmp_path / "w").stat().st_size for copied in reported["copied"]]
    assert len(shares) == 2
    assert all(0.45 < share < 0.55 for share in shares), shares
    assert reported["tokens"] == {name: each.generated.token_ids.tolist() for name, each in run(ours, mixed(6)).items()}


def assert_logprobs_of(model: PreTrainedModel, asked: Sequence[Request], done: Mapping[str, Completion]) -> None:
    """The behaviour logprobs of `done` are those of `model`."""
    for one in asked:
        found = done[one.trajectory_id].generated
        assert np.abs(plain_logprobs(model, one, found) - found.logprobs).max() < 1e-4
