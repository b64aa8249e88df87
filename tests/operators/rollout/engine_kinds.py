"""Engines of every kind over the same tiny models, and requests for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from emulated_engines import emulated
from tiny_engines import engine, mixed, speculating
from vllm_engines import FAMILY, model_folder, vllm_engine

from infra.name_lookup import member_of
from operators.rollout.engine import Completion, Engine, Request
from operators.rollout.two_versions import TwoVersionEngine

MakeEngine = Callable[..., Engine]
VLLM: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm_async": {"asynchronous": True},
    "vllm_sampler": {"asynchronous": True, "token_sampler": "vllm"},
}
NAMED = "LAMINAR_ENGINE"
"""The kind of the engine that this environment variable names, "module:factory" (CONTRIBUTING.md)."""
STOPS = (3, 7)


def named_factory() -> Callable[..., Engine] | None:
    """The factory that the environment variable names. Raises ValueError if it does not exist."""
    if not (name := os.environ.get(NAMED)):
        return None
    module, _, member = name.rpartition(":")
    factory: Callable[..., Engine] = member_of(module, member, "factory", callable)
    return factory


_NAMED = named_factory()
KINDS = ("transformers", "speculating", "emulated", "two_versions", *VLLM, *([NAMED] if _NAMED else []))
WITH_MODEL = tuple(kind for kind in KINDS if kind not in ("speculating", "emulated", "two_versions"))
"""Engines that run a model: synthetic tokens have neither a distribution nor weights."""
OWN_SAMPLERS = {"vllm_sampler", *([NAMED] if getattr(_NAMED, "own_sampler", False) else [])}
"""Kinds whose resumed responses get other draws than if they had not been interrupted."""
REPEATING = tuple(kind for kind in KINDS if kind not in OWN_SAMPLERS)


def maker(kind: str) -> MakeEngine:
    """A factory of engines of a kind, over the weights of `tiny_model(family)`."""
    if kind in VLLM:
        pytest.importorskip("vllm", reason="make vllm-test has it")
        return partial(vllm_engine, **VLLM[kind])

    def make(family: str = FAMILY, **options: Any) -> Engine:
        if kind == NAMED:
            assert _NAMED is not None, f"set {NAMED}"
            return _NAMED(model_folder(family), **{"slots": 8, "kv_capacity": None, "dtype": "float32"} | options)
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
