"""Conversations that continue recorded tokens, with published chat templates and the real tokenizer."""

from __future__ import annotations

import pytest
from published_templates import PUBLISHED, QWEN3, WITH_TOOLS, tokenizer

from infra.models.conversations import ConversationFormat

QUESTION, AGAIN = {"role": "user", "content": "What is 12*7?"}, {"role": "user", "content": "Sure?"}
SAID = {"role": "assistant", "content": "84"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATES = {**PUBLISHED, **{f"{name} with tools": each for name, each in WITH_TOOLS.items()}}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_recorded_and_new_tokens_are_the_whole_rendering(name: str, ended: bool) -> None:
    template, end, _ = TEMPLATES[name]
    form = ConversationFormat(tokenizer(template, end), plain=False)
    tools = TOOLS if "tools" in name else []
    prompt, whole = form.first_tokens([QUESTION], tools), form.first_tokens([QUESTION, SAID, AGAIN], tools)
    text = form.tokenizer.decode(whole)
    drawn = text.removeprefix(form.tokenizer.decode(prompt)).partition(end)[0] + (end if ended else "")
    response = form.tokenizer.encode(drawn, add_special_tokens=False)
    following = form.next_tokens([QUESTION, SAID, AGAIN], tools, 2, response[-1])
    assert form.tokenizer.decode([*prompt, *response, *following]) == text
    assert "84" in drawn
    assert not form.rewrites_history([QUESTION, SAID, AGAIN], tools, 2)


def test_template_that_drops_reasoning_rewrites_history() -> None:
    form = ConversationFormat(tokenizer(QWEN3), plain=False)
    thought = {"role": "assistant", "content": "<think>\n12*7\n</think>\n\n84"}
    assert form.rewrites_history([QUESTION, thought, AGAIN], [], 2)
    assert form.rewrites_history([QUESTION, thought, AGAIN, thought, AGAIN], [], 4)


def test_tokens_of_one_character_have_the_same_offset() -> None:
    form = ConversationFormat(tokenizer(None), plain=True)
    encode, end = form.tokenizer.encode, form.tokenizer.eos_token_id
    assert form.offsets_of([*encode("a€b"), end]) == [0, 1, 1, 1, 2, 3]
    assert form.offsets_of([*encode("<bos>é")]) == [0, 0, 0], "a special token has no text"
    _, part, _ = encode("€")
    assert form.offsets_of([part] * 5) == [0, 0, 0, 0, 4], "no character has more than four bytes"


def test_messages_of_developers_are_those_of_the_system() -> None:
    """Most templates know no developer, and drop what has this role."""
    form = ConversationFormat(tokenizer(PUBLISHED["qwen2"][0]), plain=False)
    messages = [[{"role": role, "content": "Be brief."}, QUESTION] for role in ("developer", "system")]
    developer, system = [form.tokenizer.decode(form.first_tokens(each, [])) for each in messages]
    assert developer == system
    assert "Be brief." in system
