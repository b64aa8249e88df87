"""Chat messages formatted by typical templates, with the real tokenizer and template engine."""

from __future__ import annotations

import pytest
from published_templates import CHATML, NO_END, PUBLISHED, TRIMS, tokenizer

from infra.models.chat import chat_text, message_frame, stop_tokens, turn_ends

DEAF = "{% for m in messages %}{% if m.role != 'user' or loop.first %}{{ m.content }}|{% endif %}{% endfor %}"
ECHOES = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ messages[-1].content }}"
CALL = [{"role": "user", "content": "What is 12*7?"}]
MODEL = {"role": "assistant", "content": "Let me see"}


@pytest.mark.parametrize("template", [CHATML, TRIMS, NO_END])
def test_message_frames_equal_the_template_of_the_conversation(template: str) -> None:
    """The model's turns keep their sampled tokens: they are not encoded again."""
    made = tokenizer(template)
    frame = message_frame(made, "user")
    prompt = made.encode(chat_text(made, CALL), add_special_tokens=False)
    turn, observed = made.encode("Let me see", add_special_tokens=False), made.encode("84", add_special_tokens=False)
    for ended in (True, False):
        drawn = [*turn, made.eos_token_id] if ended else turn
        tokens = [*prompt, *drawn, *frame.around(observed, ended)]
        if template == NO_END and ended:
            continue  # the sampled end-of-sequence token is not part of this template
        whole = [*CALL, {"role": "assistant", "content": "Let me see"}, {"role": "user", "content": "84"}]
        assert made.decode(tokens) == chat_text(made, whole)


def test_message_frame_has_special_tokens_as_single_tokens() -> None:
    made = tokenizer(CHATML)
    frame = message_frame(made, "tool")
    start, end = made.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert frame.end == (end,)
    assert frame.before[-6:] == (start, *made.encode("tool\n", add_special_tokens=False))
    assert frame.after[:1] == (end,)
    assert start in frame.after
    said = made.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert frame.around(said, ended=True).count(end) == 1


@pytest.mark.parametrize(
    ("template", "role", "words"),
    [
        (None, "user", "has no chat template"),
        (TRIMS, "tool", r"fails on messages of user, assistant, tool \(TemplateError: tool is not supported\)"),
        ("{% for m in %}", "user", "fails on messages of user, assistant, user"),
        ("{{ messages[7].content.x }}", "user", "fails on messages"),
        (DEAF, "user", "must contain a message of user"),
        (ECHOES, "user", "must contain a message of user after the assistant's exactly once"),
    ],
)
def test_message_frame_raises_for_an_unsuitable_template(template: str | None, role: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        message_frame(tokenizer(template), role)


def test_stop_tokens_include_those_of_the_generation_config() -> None:
    made = tokenizer(CHATML)
    start, end = made.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    made.generation_stop_tokens = (end, start)
    assert stop_tokens(made) == (end, start)


@pytest.mark.parametrize("template", [CHATML, TRIMS])
def test_turn_ends_include_the_token_of_the_template(template: str) -> None:
    made = tokenizer(template)
    end = made.convert_tokens_to_ids("<|im_end|>")
    made.eos_token = "<bos>"
    assert turn_ends(made) == (made.eos_token_id, end)
    frame = message_frame(made, "user")
    assert frame.end == (end,)


@pytest.mark.parametrize("name", PUBLISHED)
def test_turns_of_published_templates_end(name: str) -> None:
    """Also where the tokenizer's end of sequence is another token than that of a turn, as of base models."""
    template, ends, sequence_ends = PUBLISHED[name]
    made = tokenizer(template)
    made.eos_token = sequence_ends
    end = made.convert_tokens_to_ids(ends)
    assert turn_ends(made) == tuple(dict.fromkeys([made.eos_token_id, end]))
    frame = message_frame(made, "user")
    assert frame.end == (end,)
    said = made.encode("84", add_special_tokens=False)
    assert made.decode(frame.around(said, ended=False)).startswith(ends)
    assert end not in frame.before
    assert made.decode([*frame.before, *said, *frame.after]) in chat_text(
        made, [*CALL, MODEL, {"role": "user", "content": "84"}]
    )


@pytest.mark.parametrize("template", [NO_END, ECHOES, None])
def test_turn_ends_are_stop_tokens_without_a_template_end(template: str | None) -> None:
    made = tokenizer(template)
    assert turn_ends(made) == stop_tokens(made)
