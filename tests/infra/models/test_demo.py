"""The demonstration model: deterministic, and unchanged by saving and loading."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.models.demo import build_demo_model, build_demo_tokenizer
from infra.models.demo_config import PHRASES, DemoModelConfig

CHAIN_SUM = "State the final answer to the following arithmetic problem: 4 - 1 + 7 ="
GCD = "Find the Greatest Common Divisor (GCD) of these numbers: 24, 39. Give only the GCD as your final answer."
TINY = DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48)


@pytest.mark.parametrize(
    ("task", "text", "tokens"),
    [
        ("chain_sum", CHAIN_SUM, [PHRASES["chain_sum"][0], "4", " - ", "1", " + ", "7", " ="]),
        ("chain_sum", "4-1=3;#-4", list("4-1=3;#-4")),
        ("gcd", GCD, [PHRASES["gcd"][0], "2", "4", ", ", "3", "9", PHRASES["gcd"][2]]),
        ("gcd", "49 29;#1", [*"49", "Ġ", *"29;#1"]),
        ("unheard of", "4 - 1", ["4", "Ġ", "-", "Ġ", "1"]),
    ],
)
def test_demo_tokenizer_encodes_phrases_as_single_tokens(task: str, text: str, tokens: list[str]) -> None:
    tokenizer = build_demo_tokenizer(PHRASES.get(task, ()))
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("text", [CHAIN_SUM, GCD, "one\n\ttwo  ", "naïve 数"])
@pytest.mark.parametrize("task", ["chain_sum", "gcd"])
def test_demo_tokenizer_round_trips_any_text(tmp_path: Path, task: str, text: str) -> None:
    model, tokenizer = build_demo_model(replace(TINY, task=task))
    model.config.save_pretrained(tmp_path)  # the config decides which class AutoTokenizer creates
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text)
    assert loaded.encode(text) == ids
    assert loaded.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, model.config.vocab_size)
    assert loaded.model_max_length == TINY.max_positions


def test_demo_weights_survive_saving_and_loading(tmp_path: Path) -> None:
    model, _ = build_demo_model(TINY)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_demo_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    first, _ = build_demo_model(TINY)
    assert torch.equal(torch.rand(1), expected)
    second, _ = build_demo_model(TINY)
    other, _ = build_demo_model(replace(TINY, seed=1))
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.model.embed_tokens.weight is first.lm_head.weight


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("hidden_size", 129), ("kv_heads", 3), ("rope_theta", 0.0), ("max_positions", -1)],
)
def test_demo_config_names_an_invalid_size(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(DemoModelConfig(), **{field: value})


def test_demo_config_does_not_import_torch() -> None:
    code = "import sys, infra.models.demo_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
