"""The small files of a model folder make a folder without weights, in which an engine begins with drawn ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_batches import save_tiny_model

from infra.models.checkpoint_folder import load_model
from infra.models.config_files import is_without_weights, read_config_files, write_without_weights
from infra.models.empty_model import allocate, draw_weights, empty_model


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return read_config_files(save_tiny_model(tmp_path / "model"))


def test_config_files_are_written_privately_and_once(files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "model"
    write_without_weights(folder, files)
    write_without_weights(folder, files)
    assert read_config_files(folder) == files
    assert "config.json" in files
    assert is_without_weights(folder)
    assert not is_without_weights(tmp_path / "model")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    (folder / "config.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match="has other files than those of the run"):
        write_without_weights(folder, files)


@pytest.mark.parametrize("name", ["../config.json", "modeling.py", "model.safetensors", "weights-from-relays"])
def test_other_names_are_not_written_into_a_model_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a file of a model's config or tokenizer"):
        write_without_weights(tmp_path / "model", {"config.json": b"{}", name: b""})
    assert not any(tmp_path.iterdir())


def test_drawn_weights_are_finite_and_repeatable(files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "without"
    write_without_weights(folder, files)
    logits = []
    for _ in range(2):
        model = empty_model(folder)
        allocate(model, torch.device("cpu"))
        draw_weights(model)
        logits.append(model(torch.arange(8)[None]).logits)
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)
    with pytest.raises(FileNotFoundError, match="has no weights"):
        load_model(folder)
