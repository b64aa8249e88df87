"""What ranks write together is written although one is slow, and may fail without putting them out of step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_batches import save_tiny_model
from write_together import SHORT_TIMEOUT_S, TENSORS, TRIES

from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors, weights_digest

FULL = (1, TRIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the model and what the ranks wrote (see write_together.py)."""
    made = tmp_path_factory.mktemp("together")
    save_tiny_model(made / "model")
    script, works = (
        Path(__file__).with_name("write_together.py"),
        ["slow", "background", *(f"full={number}" for number in FULL)],
    )
    subprocess.run([sys.executable, str(script), str(made), *works], check=True)
    return made


def found(folder: Path, work: str, ranks: int) -> list[Any]:
    """What each of `ranks` ranks found."""
    return [json.loads((folder / work / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_version_may_take_longer_than_a_collective_may(folder: Path) -> None:
    """Ranks that write into the file wait for one that sends its parts, in pieces."""
    assert found(folder, "slow", 3)[0] == [[0.0, 0.0, 2.0]] * TENSORS


def test_parts_of_another_machine_are_sent_in_the_background(folder: Path) -> None:
    """Rank 0 begins, and computes a step, before anything is sent; then it waits longer than a collective may. Weights
    change afterwards."""
    waited, waited_in_step, wrong = found(folder, "background", 2)[0]
    assert waited > SHORT_TIMEOUT_S
    assert waited_in_step > SHORT_TIMEOUT_S
    assert wrong == 0


@pytest.mark.parametrize("full", FULL)
def test_ranks_stay_in_step_if_the_final_model_fails_halfway(folder: Path, full: int) -> None:
    (error, attempts), (_, of_rank_1) = found(folder, f"full={full}", 2)
    assert attempts == of_rank_1 == min(full + 1, TRIES)
    result = folder / f"full={full}" / "result"
    if full == TRIES:
        assert f"failed after {TRIES} attempts" in error
        assert "No space left on device" in error
        assert not result.exists()
    else:
        written, expected = (weights_digest(weight_tensors(load_model(each))) for each in (result, folder / "model"))
        assert written == expected
