from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from infra.models import weights
from infra.models.checkpoint_folder import load_model, load_tokenizer, save_folder
from infra.models.weights import load_weights, save_weights, weight_tensors


def tiny(seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape: dict[str, object] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(shape | changes))).eval()


def tokenizer() -> Qwen2Tokenizer:
    return Qwen2Tokenizer(vocab={"<eos>": 0, "a": 1, "b": 2}, merges=[], unk_token="<eos>", eos_token="<eos>")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(8)[None]).logits


def test_save_folder_and_load_return_the_same_model(tmp_path: Path) -> None:
    model = tiny()
    save_folder(model, tokenizer(), tmp_path / "m")
    assert torch.equal(logits(load_model(tmp_path / "m")), logits(model))
    assert load_tokenizer(tmp_path / "m")("ab")["input_ids"] == [1, 2]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    assert torch.equal(logits(plain.eval()), logits(model))
    assert load_model(tmp_path / "m", torch.bfloat16).dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_save_folder_raises_for_an_existing_folder(tmp_path: Path) -> None:
    save_folder(tiny(0), tokenizer(), tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        save_folder(tiny(1), tokenizer(), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_failed_save_leaves_no_files(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, path: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_folder(tiny(), Broken(), tmp_path / "m")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "load", "message"),
    [
        (None, load_model, "no model folder at"),
        (None, load_tokenizer, "no model folder at"),
        ([], load_model, r"no config.json"),
        (["config.json"], load_model, r"no weights \(model.safetensors"),
        (["config.json", "pytorch_model.bin"], load_model, r"pickled weights \(\.bin\) are not read"),
        (["config.json", "model.safetensors"], load_tokenizer, r"no tokenizer \(tokenizer.json"),
    ],
)
def test_load_names_a_missing_file(
    tmp_path: Path, files: list[str] | None, load: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "m"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_load_model_names_an_unreadable_folder(tmp_path: Path) -> None:
    save_folder(tiny(), tokenizer(), tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ValueError, match=r"cannot be loaded as a causal language model"):
        load_model(tmp_path / "m")


def test_load_model_names_missing_tensors(tmp_path: Path) -> None:
    save_folder(tiny(), tokenizer(), tmp_path / "m")
    tensors = weight_tensors(tiny())
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors of its config, such as model.norm.weight"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("tied", [True, False])
def test_load_weights_restores_weights_in_place(tmp_path: Path, tied: bool) -> None:
    source, target = tiny(0, tie_word_embeddings=tied), tiny(1, tie_word_embeddings=tied)
    places = {name: tensor.data_ptr() for name, tensor in weight_tensors(target).items()}
    assert not torch.equal(logits(source), logits(target))
    save_weights(source, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert torch.equal(logits(source), logits(target))
    assert places == {name: tensor.data_ptr() for name, tensor in weight_tensors(target).items()}
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(places)
        assert ("lm_head.weight" in set(file.keys())) is not tied


def test_save_weights_is_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_weights(tiny(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("part_bytes", [1 << 20, 100])
def test_few_bytes_are_read_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    source, target = tiny(0), tiny(1)
    save_weights(source, tmp_path / "w.safetensors")
    started: list[int] = []

    def pool(threads: int) -> ThreadPoolExecutor:
        started.append(threads)
        return ThreadPoolExecutor(threads)

    monkeypatch.setattr(weights, "ThreadPoolExecutor", pool)
    monkeypatch.setitem(weights._PART_BYTES, "cpu", part_bytes)
    load_weights(target, tmp_path / "w.safetensors")
    assert torch.equal(logits(source), logits(target))
    assert bool(started) is (part_bytes == 100)


def test_load_weights_finds_a_tied_tensor_by_its_other_name(tmp_path: Path) -> None:
    source, target = tiny(0), tiny(1)
    tensors = {name: tensor.clone() for name, tensor in weight_tensors(source).items()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "w")
    load_weights(target, tmp_path / "w")
    assert torch.equal(logits(source), logits(target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is not in the model"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"shape \[3\], the model \[16\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16).half()}), "dtype F16, the model F32"),
    ],
)
def test_load_weights_changes_nothing_on_a_mismatch(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    target = tiny(1)
    before = logits(target)
    tensors = {name: tensor.clone() for name, tensor in weight_tensors(tiny(0)).items()}
    change(tensors)
    save_file(tensors, tmp_path / "w")
    with pytest.raises(ValueError, match=message):
        load_weights(target, tmp_path / "w")
    assert torch.equal(logits(target), before)


def test_load_weights_raises_for_a_missing_or_invalid_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        load_weights(tiny(), tmp_path / "w")
    (tmp_path / "w").write_bytes(b"PK\x03\x04 not safetensors")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_weights(tiny(), tmp_path / "w")


def test_load_model_rejects_untied_output_weights(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.5
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="set tie_word_embeddings to false there"):
        load_model(tmp_path)


@pytest.mark.parametrize(("ends", "expected"), [(1, (1,)), ([2, 1], (2, 1)), (None, ())])
def test_tokenizer_has_stop_tokens_of_the_generation_config(
    tmp_path: Path, ends: object, expected: tuple[int, ...]
) -> None:
    save_folder(tiny(), tokenizer(), tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert load_tokenizer(tmp_path / "m").generation_stop_tokens == expected


def test_load_tokenizer_rejects_invalid_stop_tokens(tmp_path: Path) -> None:
    save_folder(tiny(), tokenizer(), tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"eos_token_id in .* must be a token id or a list of them"):
        load_tokenizer(tmp_path / "m")
