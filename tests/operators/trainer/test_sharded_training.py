"""No rank holds more than its share of a model and a few layers; any number of ranks restores a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from infra.models.demo import build_demo_tokenizer

pytestmark = pytest.mark.timeout(900)  # several processes share the machine's cores
BYTES = 16
"""Of a parameter: weight, gradient and two moments in float32."""
LAYERS = 3
"""The largest layers, in addition to a rank's share, that it may hold at once."""
ACTIVATIONS = 24 << 20
"""For activations of two hundred tokens and the libraries' own buffers."""
SMALL = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 16, "vocab_size": 2048}
"""15 M parameters: with all of them a rank of four would exceed its bound nearly twice."""
RANKS = (1, 4)


def save_model(folder: Path, shape: dict[str, int]) -> tuple[int, int]:
    """Save a random model; return its parameters and those of its largest layer."""
    config = Qwen2Config(
        **shape, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    build_demo_tokenizer((), 64).save_pretrained(folder)
    layer = sum(each.numel() for each in model.model.layers[0].parameters())
    sizes = [each.numel() for each in model.parameters()]
    assert max(sizes) < sum(sizes) / 10
    return sum(sizes), max(layer, model.model.embed_tokens.weight.numel())


Results = list[dict[str, Any]]


def run_ranks(folder: Path, *jobs: str) -> list[Results]:
    """What each rank of each of `jobs`, `NAME:RANKS[:OF]`, measured (see sharded_ranks.py)."""
    script = Path(__file__).with_name("sharded_ranks.py")
    # Freed memory goes back at once, so that a peak is of memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(script), str(folder), *jobs]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = [(name, int(ranks)) for name, ranks in (job.split(":")[:2] for job in jobs)]
    return [
        [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)] for name, ranks in names
    ]


def check_peaks(results: Results, parameters: int, layer: int) -> None:
    """Assert that no rank held more than its share and `LAYERS` layers."""
    bound = BYTES * parameters / len(results) + LAYERS * BYTES * layer + ACTIVATIONS
    peaks = [result["peaks"] for result in results]
    assert set(peaks[0]) == {"construction", "update", "publication", "checkpoint", "resume"}
    assert all(peak <= bound for each in peaks for peak in each.values()), (f"{bound:.3g}", peaks)


@dataclass(frozen=True)
class Measured:
    """The parameters of the model and of its largest layer, the results by number of ranks, and of a restoration."""

    sizes: tuple[int, int]
    runs: dict[int, Results]
    restored_by_two: Results


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("sharded")
    sizes = save_model(folder / "model", SMALL)
    *runs, restored = run_ranks(folder, *(f"run-{ranks}:{ranks}" for ranks in RANKS), f"restored:2:run-{RANKS[-1]}")
    return Measured(sizes, dict(zip(RANKS, runs, strict=True)), restored)


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_hold_only_their_share_of_the_model(measured: Measured, ranks: int) -> None:
    check_peaks(measured.runs[ranks], *measured.sizes)


def test_ranks_read_the_same_model(measured: Measured) -> None:
    assert len({result["initial"] for ranks in RANKS for result in measured.runs[ranks]}) == 1


@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_resumes_bit_identically_with_the_same_ranks(measured: Measured, ranks: int) -> None:
    results = measured.runs[ranks]
    assert len({result[key] for result in results for key in ("saved", "restored")}) == 1
    assert results[0]["files"] == ["checkpoint.json", *(f"rank-{n}-of-{ranks}.safetensors" for n in range(ranks))]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_publish_together_whatever_they_do(measured: Measured, ranks: int) -> None:
    first = measured.runs[ranks][0]  # after a batch, while the others are idle, while they have a batch
    assert first["published"] == [first["trained"]] * 3


@pytest.mark.parametrize("ranks", RANKS)
def test_stopped_ranks_keep_a_checkpoint_of_the_same_version(measured: Measured, ranks: int) -> None:
    results = measured.runs[ranks]
    assert all(result["stopped"] for result in results)
    assert [result["kept"] for result in results] == [["1.1", "1.2"]] * ranks


def test_checkpoint_of_four_ranks_is_restored_by_two(measured: Measured) -> None:
    for result in measured.restored_by_two:
        assert result["restored"] == measured.runs[4][0]["saved"]
