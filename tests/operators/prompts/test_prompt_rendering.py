"""Rendering: texts of questions, chat templates, prompts that are too long."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from operators.prompts.config import PromptsConfig
from operators.prompts.question import Question
from operators.prompts.rendering import PromptTooLong, check_template, render
from operators.prompts.sources import open_source
from schemas.codec import encode
from schemas.records import Message, Sampling


class CharacterTokenizer:
    """One token per character; token 1 begins a text with special tokens."""

    eos_token_id: Any = 2
    chat_template: str | None = "yes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def plain(text: str, *messages: Message) -> Question:
    return Question(0, text, messages, {"answer": "é"}, "sums")


@pytest.mark.parametrize(
    ("task", "args", "words"),
    [
        (
            "chain_sum",
            {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1},
            r"State the final answer to the following arithmetic problem: \d( [+-] \d){2,4} =",
        ),
        (
            "gcd",
            {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 50},
            r"Find the Greatest Common Divisor \(GCD\) of these numbers: \d+, \d+\. Give only the GCD as .*\.",
        ),
    ],
)
def test_render_keeps_the_question_of_the_library(task: str, args: dict, words: str) -> None:
    config = PromptsConfig(task=task, task_args=args, max_new_tokens=48, samples_per_prompt=8, seed=11, stop=("\n",))
    question = open_source(config)[41]
    prompt = render(question, 41, config, CharacterTokenizer(), context=512)
    assert re.fullmatch(words, prompt.text)
    assert prompt.prompt_id == "p41"
    assert prompt.token_ids.to_pylist() == [1, *map(ord, prompt.text)]
    assert prompt.samples == 8
    assert prompt.sampling == Sampling(1.0, 1.0, 0, 48, (2,), 11, ("\n",))
    entry = json.loads(prompt.reference)
    assert (entry["question"], entry["task_args"]) == (prompt.text, args)
    encode(prompt)  # raises if it does not fit its schema


class StoppingTokenizer(CharacterTokenizer):
    """Ends a sequence by 2, by 7 of its generation_config.json, and a turn by the special token `|`."""

    generation_stop_tokens = (7,)
    added_tokens_decoder = {ord("|"): SimpleNamespace(special=True)}  # noqa: RUF012

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"<{turn['role']}>{turn['content']}|" for turn in conversation) + "<assistant>"


@pytest.mark.parametrize(
    ("settings", "plain_agents", "expected"),
    [
        ({}, False, (2, 7)),
        ({"chat_template": True}, False, (2, 7, ord("|"))),
        ({"chat_template": True}, True, (2, 7, ord("|"))),
        ({"environment": "agent"}, False, (2, 7, ord("|"))),
        ({"environment": "agent"}, True, (2, 7)),
        ({"environment": "agent", "chat_template": True}, True, (2, 7)),
    ],
)
def test_stop_tokens_include_turn_ends_with_a_chat_template(
    settings: dict[str, Any], plain_agents: bool, expected: tuple[int, ...]
) -> None:
    """They are those by which the gateway's own format ends a response, for an agent's prompt."""
    config = PromptsConfig(task="gcd", **settings)
    prompt = render(plain("2?"), 0, config, StoppingTokenizer(), 100, plain_agents=plain_agents)
    assert prompt.sampling.stop_token_ids == expected


def test_template_surrounds_the_question_and_keeps_other_braces() -> None:
    config = PromptsConfig(task="gcd", template="Q: {prompt} Use \\boxed{}.")
    prompt = render(plain("What {is} 2?"), 0, config, CharacterTokenizer(), 100)
    assert prompt.text == "Q: What {is} 2? Use \\boxed{}."
    assert prompt.messages == ()
    assert prompt.reference == '{"answer":"é"}'


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (plain("2?"), "<system>Be kind.<user>Q: 2?<assistant>"),
        (plain("2?", Message("user", "2?")), "<system>Be kind.<user>Q: 2?<assistant>"),
        (
            plain("x", Message("system", "Own."), Message("user", "2?")),
            "<system>Own.<user>Q: 2?<assistant>",
        ),
    ],
)
def test_chat_template_adds_its_own_special_tokens(question: Question, text: str) -> None:
    config = PromptsConfig(task="gcd", chat_template=True, system="Be kind.", template="Q: {prompt}")
    prompt = render(question, 0, config, CharacterTokenizer(), 100)
    assert prompt.text == text
    assert prompt.token_ids.to_pylist() == list(map(ord, text))
    assert "".join(f"<{each.role}>{each.content}" for each in prompt.messages) + "<assistant>" == text


def test_conversation_without_chat_template_raises() -> None:
    conversation = plain("x", Message("user", "1?"), Message("tool", "2"))
    with pytest.raises(ValueError, match="set chat_template"):
        render(conversation, 0, PromptsConfig(task="gcd"), CharacterTokenizer(), 100)
    bare = CharacterTokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="tokenizer has no chat template"):
        render(conversation, 0, PromptsConfig(task="gcd", chat_template=True), bare, 100)


def test_check_template_raises_for_a_failing_template() -> None:
    class Refuses(CharacterTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
            raise RuntimeError("no system messages")

    config = PromptsConfig(task="gcd", chat_template=True, system="Be kind.")
    with pytest.raises(ValueError, match=r"fails on messages of system, user \(RuntimeError: no system messages\)"):
        check_template(config, Refuses())
    check_template(config, CharacterTokenizer())
    check_template(PromptsConfig(task="gcd"), Refuses())


def test_render_raises_if_no_room_for_one_token() -> None:
    config = PromptsConfig(task="gcd", max_new_tokens=48)
    assert render(plain("12345678"), 0, config, CharacterTokenizer(), context=10).sampling.max_new_tokens == 1
    assert render(plain("12345678"), 0, config, CharacterTokenizer(), context=57).sampling.max_new_tokens == 48
    with pytest.raises(PromptTooLong, match="prompt 7 has 9 tokens") as caught:
        render(plain("12345678"), 7, config, CharacterTokenizer(), context=9)
    assert (caught.value.length, caught.value.context) == (9, 9)


def test_render_overrides_purpose_and_samples() -> None:
    tokenizer = CharacterTokenizer()
    tokenizer.eos_token_id = [2, 3]
    config = PromptsConfig(task="gcd")
    prompt = render(plain("1?"), 4, config, tokenizer, 100, purpose="evaluation", samples=1)
    assert (prompt.prompt_id, prompt.samples, prompt.sampling.stop_token_ids) == ("e4", 1, (2, 3))
