"""Models are built without memory for weights, which are read later; files that do not fit are rejected."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_batches import save_tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from infra.models.checkpoint_folder import load_model, load_tokenizer, write_model
from infra.models.empty_model import allocate, empty_model, read_weights
from infra.models.weights import weight_tensors

CPU = torch.device("cpu")


def loaded(folder: Path) -> PreTrainedModel:
    model = empty_model(folder)
    allocate(model, CPU)
    read_weights(model, folder)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace or remove (None) tensors of the weight file."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")


def test_empty_model_allocates_no_parameter_but_computes_buffers(folder: Path) -> None:
    model, whole = empty_model(folder), load_model(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    pairs = list(zip(model.buffers(), whole.buffers(), strict=True))
    assert pairs
    assert all(torch.equal(one, other) for one, other in pairs)


def test_read_weights_equal_those_of_a_loaded_model(folder: Path) -> None:
    model, whole = loaded(folder), load_model(folder)
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    pairs = zip(model.state_dict().items(), whole.state_dict().items(), strict=True)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in pairs)


def test_read_weights_converts_them_to_float32(folder: Path) -> None:
    name = "model.norm.weight"
    rounded = load_file(folder / "model.safetensors")[name].to(torch.bfloat16)
    change(folder, {name: rounded})
    assert torch.equal(loaded(folder).model.norm.weight, rounded.float())


def test_read_weights_accepts_names_without_the_models_prefix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    expected = load_model(folder)
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(loaded(folder).model.norm.weight, expected.model.norm.weight)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (None, "model.norm.weight is missing"),
        (torch.zeros(3), r"model.norm.weight has shape \[3\], the model \[32\]"),
    ],
)
def test_read_weights_names_tensors_that_do_not_fit(folder: Path, changed: torch.Tensor | None, reason: str) -> None:
    change(folder, {"model.norm.weight": changed})
    with pytest.raises(ValueError, match=reason):
        loaded(folder)


def test_read_weights_rejects_untied_output_weights(folder: Path) -> None:
    output = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, {"lm_head.weight": output.clone()})
    loaded(folder)
    output[-1, -1] += 1
    change(folder, {"lm_head.weight": output})
    with pytest.raises(ValueError, match=r"has separate output weights, but its config\.json ties them"):
        loaded(folder)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", ""), ("gpt2", "transformer."), ("gpt_neox", "gpt_neox.")])
def test_read_weights_rejects_untied_output_of_other_names(tmp_path: Path, family: str, prefix: str) -> None:
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made: PreTrainedModel = (
        GPT2LMHeadModel(GPT2Config(**shape))
        if family == "gpt2"
        else GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=32, tie_word_embeddings=True))
    )
    made.save_pretrained(tmp_path)
    inside = made.base_model_prefix + "."
    stored = {f"{prefix}{n.removeprefix(inside)}": t for n, t in load_file(tmp_path / "model.safetensors").items()}
    (embedding,) = (name for name in stored if name.endswith(("wte.weight", "embed_in.weight")))
    output = stored[embedding].clone()
    for changed in (0.0, 1.0):
        name = "lm_head.weight" if family == "gpt2" else "embed_out.weight"
        save_file(stored | {name: output + changed}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="has separate output weights") if changed else nullcontext():
            loaded(tmp_path)


@pytest.mark.parametrize("others", [{"do_sample": True, "temperature": 0.6}, {"do_sample": False, "temperature": 0.6}])
def test_saved_model_keeps_the_end_tokens_of_its_folder(folder: Path, tmp_path: Path, others: dict[str, Any]) -> None:
    """Also beside settings that transformers reads but does not save."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 107], **others}))
    model = loaded(folder)
    tensors = weight_tensors(model)
    write_model(model, load_tokenizer(folder), tensors, tensors.items(), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 107]
    assert (saved.get("temperature") == 0.6) is others["do_sample"]


def test_empty_model_names_a_missing_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        empty_model(folder)
