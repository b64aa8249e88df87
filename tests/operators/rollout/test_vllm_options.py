"""Options of vLLM that need a GPU are refused on a CPU, with the name of the setting."""

from __future__ import annotations

import pytest

from operators.rollout.vllm_options import reject_on_cpu


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enforce_eager": False}, "enforce_eager must be true on a CPU"),
        ({"enable_sleep_mode": True}, r"rollout\.vllm\.enable_sleep_mode needs a GPU"),
        ({"quantization": "fp8"}, r"rollout\.vllm\.quantization = 'fp8' needs a GPU"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"rollout\.vllm\.kv_cache_dtype = 'fp8_e5m2' needs a GPU"),
    ],
)
def test_option_that_needs_a_gpu_is_refused_on_a_cpu(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reject_on_cpu(options)


@pytest.mark.parametrize("options", [{}, {"enable_sleep_mode": False, "kv_cache_dtype": "auto", "quantization": None}])
def test_other_options_are_accepted_on_a_cpu(options: dict[str, object]) -> None:
    reject_on_cpu(options)
