"""No rank holds more than its share and a few layers: of 200 M parameters on 1 to 8 ranks, and beside adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "operators" / "trainer"))

from sharded_ranks import MODELS
from test_sharded_training import FURTHER, SMALL, check_peaks, check_plan, run_ranks, save_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 21, "vocab_size": 16_384}


def test_ranks_hold_only_their_share_of_200_million_parameters(tmp_path: Path) -> None:
    sizes = save_model(tmp_path / "model", SHAPE)
    assert sizes[0] == pytest.approx(200e6, rel=0.05)
    runs = run_ranks(tmp_path, *(f"run-{ranks}:{ranks}" for ranks in (1, 2, 4, 8)))
    for results in runs:
        check_peaks(results, *sizes)
    for results in runs:
        check_plan(results, tmp_path / "model")
    saved = runs[2][0]["saved"]
    for results in run_ranks(tmp_path, "of-2:2:run-4", "of-8:8:run-4"):
        assert {result["restored"] for result in results} == {saved}


def test_ranks_with_adapters_hold_only_their_share(tmp_path: Path) -> None:
    sizes = save_model(tmp_path / "model", SMALL)
    (results,) = run_ranks(tmp_path, "adapters:4:adapters")
    check_peaks(results, *sizes, FURTHER["adapters"])
    check_plan(results, tmp_path / "model", MODELS["adapters"])
