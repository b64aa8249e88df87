"""The contract tests run for an engine that the environment names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import test_engine_contract as contract

ENGINE = """
import torch

from infra.models.checkpoint_folder import load_model
from operators.rollout.transformers_engine import TransformersEngine


class Own(TransformersEngine):
    def release(self, trajectory_ids, *, with_kv=False):
        return super().release([*trajectory_ids][LOST:], with_kv=with_kv)


def make(model, *, slots, kv_capacity, dtype):
    return Own(load_model(model, getattr(torch, dtype)), slots=slots, kv_capacity=kv_capacity)


make.own_sampler = bool(LOST)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_contract_is_tested_for_a_named_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    (tmp_path / "own.py").write_text(ENGINE.replace("LOST", str(lost)))
    monkeypatch.setenv("LAMINAR_ENGINE", f"{tmp_path / 'own.py'}:make")
    spec = importlib.util.find_spec("engine_kinds")
    assert spec is not None
    assert spec.loader is not None
    kinds = importlib.util.module_from_spec(spec)  # others keep the one without the variable
    spec.loader.exec_module(kinds)
    for group, member in ((kinds.KINDS, True), (kinds.WITH_MODEL, True), (kinds.REPEATING, not lost)):
        assert (kinds.NAMED in group) == member
    made = kinds.maker(kinds.NAMED)
    if lost:
        with pytest.raises(AssertionError):
            contract.test_released_request_resumes_with_the_same_tokens(made, 4, False)
    else:
        contract.test_released_request_resumes_with_the_same_tokens(made, 4, False)
