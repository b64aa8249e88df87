"""Options of vLLM that Laminar sets itself, and on a CPU those that need a GPU, are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate
from operators.rollout.vllm_options import argument_names, reject_on_cpu, reject_unknown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enforce_eager": False}, r"rollout\.vllm\.enforce_eager must be true on a CPU"),
        ({"quantization": "fp8"}, r"rollout\.vllm\.quantization = 'fp8' needs a GPU"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"rollout\.vllm\.kv_cache_dtype = 'fp8_e5m2' needs a GPU"),
    ],
)
def test_option_that_needs_a_gpu_is_refused_on_a_cpu(options: dict[str, object], reason: str) -> None:
    with pytest.raises(CannotGenerate, match=reason):
        reject_on_cpu(options)


@pytest.mark.parametrize("options", [{}, {"enable_sleep_mode": False, "kv_cache_dtype": "auto", "quantization": None}])
def test_other_options_are_accepted_on_a_cpu(options: dict[str, object]) -> None:
    reject_on_cpu(options)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("dtype", "float16", r"vllm\.dtype cannot be set: set rollout\.dtype"),
        ("tensor_parallel_size", 2, r"vllm\.tensor_parallel_size cannot be set: set rollout\.tensor_parallel"),
        ("kv_capacity", 4096, r"vllm\.kv_capacity cannot be set: set rollout\.kv_capacity"),
        ("token_sampler", "vllm", r"vllm\.token_sampler cannot be set: set rollout\.token_sampler"),
        ("async_scheduling", True, r"vllm\.async_scheduling cannot be set: the draws"),
        ("enable_sleep_mode", True, r"vllm\.enable_sleep_mode would have no effect.* autoscaling\.devices"),
    ],
)
def test_option_that_laminar_sets_is_refused(name: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RolloutConfig(engine="vllm", vllm={name: value})


def test_option_that_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(CannotGenerate, match=r"rollout\.vllm\.quantisation is no .* did you mean 'quantization'\?"):
        reject_unknown({"quantisation": "fp8"}, ["quantization", "seed"])
    with pytest.raises(CannotGenerate, match=r"rollout\.vllm\.other_name is no .*; remove it"):
        reject_unknown({"other_name": True}, ["quantization", "seed"])
    reject_unknown({"other_name": True}, [])


def test_names_of_options_are_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError")
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    monkeypatch.syspath_prepend(tmp_path)
    assert argument_names() == frozenset()
    source.write_text(
        "import none\n@dataclass\nclass EngineArgs:\n    model: str = none.x\n    seed: int = 0\n    x = 1\n"
    )
    assert argument_names() == {"model", "seed"}
    source.write_text("class EngineArgs(Others):\n    seed: int = 0\n")
    assert argument_names() == frozenset()


@pytest.mark.parametrize("engine", ["transformers", "emulated"])
def test_sampler_of_vllm_is_refused_for_other_engines(engine: Literal["transformers", "emulated"]) -> None:
    with pytest.raises(ValueError, match=rf"token_sampler 'vllm' requires engine 'vllm', not '{engine}': set rollout"):
        RolloutConfig(engine=engine, token_sampler="vllm")
    assert RolloutConfig(engine="vllm", token_sampler="vllm").token_sampler == "vllm"
