"""The parts of the GPU check for vLLM, with a tiny model on a CPU (`make vllm-test`)."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import vllm_parts
from benchmarks.gpu.device import make_model
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.settings import Shape, settings_for

pytest.importorskip("vllm", reason="make vllm-test has it")

NAMES = [part.call for part in PARTS if part.module == "vllm_parts"]
CPU = settings_for("cpu", 0)
WIDER = Shape(name="tiny", config={**CPU.shape.config, "num_attention_heads": 2}, memory=0)
"""Heads of 32, vLLM's minimum on CPUs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gpu") / "model"
    make_model(replace(CPU, shape=WIDER), found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_vllm_part_gives_figures(name: str, folder: Path) -> None:
    figures: list[Figure] = getattr(vllm_parts, name)(replace(CPU, shape=WIDER), folder)
    if name == "fp8":
        assert [(math.isnan(each.value), each.note) for each in figures] == [(True, "FP8 needs a GPU")]
        return
    assert all(each.value >= 0 for each in figures), figures
    assert all(each.passed is not False for each in figures), figures
    assert not [left for left in os.listdir("/dev/shm") if "gpu-check" in left]
