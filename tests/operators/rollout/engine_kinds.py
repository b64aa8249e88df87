"""Engines of every kind over the same tiny models, and requests for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from emulated_engines import emulated
from tiny_engines import engine, mixed, speculating
from vllm_engines import FAMILY, vllm_engine

from operators.rollout.engine import Completion, Engine, Request
from operators.rollout.two_versions import TwoVersionEngine

MakeEngine = Callable[..., Engine]
VLLM: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm_async": {"asynchronous": True},
    "vllm_sampler": {"asynchronous": True, "token_sampler": "vllm"},
}
KINDS = ("transformers", "speculating", "emulated", "two_versions", *VLLM)
WITH_MODEL = ("transformers", *VLLM)
"""Engines that run a model: synthetic tokens have neither a distribution nor weights."""
OWN_SAMPLER = "vllm_sampler"
"""Its resumed responses get other draws than if they had not been interrupted."""
STOPS = (3, 7)


def maker(kind: str) -> MakeEngine:
    """A factory of engines of a kind, over the weights of `tiny_model(family)`."""
    if kind in VLLM:
        pytest.importorskip("vllm", reason="make vllm-test has it")
        return partial(vllm_engine, **VLLM[kind])

    def make(family: str = FAMILY, **options: Any) -> Engine:
        if kind == "emulated":
            return emulated(**options)
        if kind == "two_versions":
            return TwoVersionEngine(engine(family, **options), engine(family, **options))
        return speculating(family, **options) if kind == "speculating" else engine(family, **options)

    return make


def stopping(count: int) -> list[Request]:
    """Requests of all kinds, most of which may stop before their limit."""
    asked = [replace(one, sampling=replace(one.sampling, max_new_tokens=30)) for one in mixed(count)]
    return [replace(one, sampling=replace(one.sampling, stop_token_ids=STOPS)) for one in asked[:-2]] + asked[-2:]


def assert_equal(one: Completion, other: Completion) -> None:
    assert one.generated.token_ids.tolist() == other.generated.token_ids.tolist()
    assert np.abs(one.generated.logprobs - other.generated.logprobs).max(initial=0.0) < 1e-4
    assert one.finish_reason == other.finish_reason
