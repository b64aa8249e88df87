"""Synthetic prompts: random tokens without text."""

from __future__ import annotations

import pytest

from operators.prompts.config import PromptsConfig
from operators.prompts.rendering import render
from operators.prompts.sources import open_source
from operators.prompts.synthetic import END, SyntheticTokenizer


def test_synthetic_prompts_have_the_length_and_differ() -> None:
    config = PromptsConfig(source="synthetic", prompt_tokens=40, max_new_tokens=100)
    source, tokenizer = open_source(config), SyntheticTokenizer(40)
    prompts = [render(source[number], number, config, tokenizer, 128) for number in range(20)]
    tokens = [prompt.token_ids.to_pylist() for prompt in prompts]
    assert {len(each) for each in tokens} == {40}
    assert len({tuple(each) for each in tokens}) == 20
    assert all(0 < token < 1000 for each in tokens for token in each)
    assert tokens[3] == render(source[3], 3, config, SyntheticTokenizer(40), 128).token_ids.to_pylist()
    assert (prompts[0].sampling.stop_token_ids, prompts[0].sampling.max_new_tokens) == ((END,), 88)


def test_synthetic_prompts_end_at_size() -> None:
    endless = open_source(PromptsConfig(source="synthetic"))
    assert endless.total is None
    assert endless[10**9].index == 10**9
    source = open_source(PromptsConfig(source="synthetic", size=3, epochs=2))
    assert source.total == 6
    assert source[5].index == 5
    with pytest.raises(IndexError):
        source[6]


@pytest.mark.parametrize(
    "wrong",
    [{"path": "x"}, {"heldout": 4}, {"chat_template": True}, {"stop": ("a",)}, {"prompt_tokens": 0}, {"epochs": 2}],
)
def test_synthetic_config_rejects_options_that_need_text(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PromptsConfig(source="synthetic", **wrong)
