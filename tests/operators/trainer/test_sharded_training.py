"""No rank holds more than its share of a model and a few layers; any number of ranks restores a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
SMALL = {"hidden_size": 384, "intermediate_size": 1344, "num_hidden_layers": 16, "vocab_size": 2048}
"""33 M parameters."""


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


def run_ranks(folder: Path, name: str, ranks: int, *of: str) -> list[dict[str, Any]]:
    """What each of `ranks` processes measured (see sharded_ranks.py)."""
    script = Path(__file__).with_name("sharded_ranks.py")
    command = [sys.executable, str(script), str(folder), name, str(ranks), *of]
    # Freed memory goes back at once, so that a peak is of memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def check_peaks(results: list[dict[str, Any]], parameters: int, layer: int) -> None:
    """Assert that no rank held more than its share and `LAYERS` layers."""
    bound = BYTES * parameters / len(results) + LAYERS * BYTES * layer + ACTIVATIONS
    peaks = [result["peaks"] for result in results]
    assert set(peaks[0]) == {"construction", "update", "publication", "checkpoint", "resume"}
    assert all(peak <= bound for each in peaks for peak in each.values()), (f"{bound:.3g}", peaks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def sizes(folder: Path) -> tuple[int, int]:
    return save_model(folder / "model", SMALL)


class Runs(dict[int, list[dict[str, Any]]]):
    """The results by number of ranks; each number is run once, when it is needed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, ranks: int) -> list[dict[str, Any]]:
        self[ranks] = run_ranks(self._folder, f"run-{ranks}", ranks)
        return self[ranks]


@pytest.fixture(scope="module")
def runs(folder: Path, sizes: tuple[int, int]) -> Runs:
    return Runs(folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_only_their_share_of_the_model(runs: Runs, sizes: tuple[int, int], ranks: int) -> None:
    check_peaks(runs[ranks], *sizes)


def test_ranks_read_the_same_model(runs: Runs) -> None:
    assert len({result["initial"] for ranks in (1, 2, 4) for result in runs[ranks]}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checkpoint_resumes_bit_identically_with_the_same_ranks(runs: Runs, ranks: int) -> None:
    found = {result[key] for result in runs[ranks] for key in ("saved", "restored")}
    assert len(found) == 1
    assert runs[ranks][0]["files"] == ["checkpoint.json", *(f"rank-{n}-of-{ranks}.safetensors" for n in range(ranks))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_idle_and_busy_ranks_join_a_gathering_of_rank_0(runs: Runs, ranks: int) -> None:
    first = runs[ranks][0]
    assert first["published_again"] == [first["published"]] * 2


def test_checkpoint_of_four_ranks_is_restored_by_two(folder: Path, runs: Runs) -> None:
    for result in run_ranks(folder, "reshard", 2, "run-4"):
        assert result["restored"] == runs[4][0]["saved"]
