"""Rendering of a question as a prompt: template, chat template, tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from infra.models.chat import ChatTokenizer as Tokenizer
from infra.models.chat import chat_text, stop_tokens, turn_ends
from operators.prompts.config import PROMPT_SLOT, TaskConfig
from operators.prompts.question import Question
from schemas.columns import token_ids
from schemas.identity import Purpose
from schemas.records import AGENT, Message, Prompt, Sampling


class PromptTooLong(ValueError):
    """A prompt of `length` tokens leaves no room for a response in a context of `context` tokens."""

    def __init__(self, number: int, length: int, context: int) -> None:
        super().__init__(f"prompt {number} has {length} tokens: no room for an answer in a context of {context}")
        self.length, self.context = length, context


def render(
    question: Question,
    number: int,
    config: TaskConfig,
    tokenizer: Tokenizer,
    context: int,
    *,
    purpose: Purpose = "train",
    samples: int | None = None,
    plain_agents: bool = False,
) -> Prompt:
    """Prompt `number` of `question`, for a model with a context of `context` tokens for prompt and response.

    `samples` overrides the configured number, for evaluation. `max_new_tokens` is reduced to the remaining
    context. Plain text is encoded with the special tokens that the tokenizer adds; a chat template contains its own.
    `plain_agents`: the gateway formats agents' messages without the chat template.
    Raises PromptTooLong, and ValueError for a conversation without a chat template.
    """
    messages = chat_messages(question, config)
    text = prompt_text(question, config, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=not config.chat_template)
    room = context - len(ids)
    if room < 1:
        raise PromptTooLong(number, len(ids), context)
    sampling = _sampling(config, tokenizer, plain_agents)
    return Prompt(
        number=number,
        purpose=purpose,
        task=config.name or question.task,
        text=text,
        token_ids=token_ids(ids),
        reference=json.dumps(question.reference, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        samples=config.samples_per_prompt if samples is None else samples,
        sampling=sampling if sampling.max_new_tokens <= room else replace(sampling, max_new_tokens=room),
        environment=config.environment,
        messages=messages,
    )


def prompt_text(question: Question, config: TaskConfig, tokenizer: Tokenizer) -> str:
    """The text for the model. Raises ValueError for a conversation without a suitable chat template."""
    if not config.chat_template:
        if len(question.messages) > 1:
            raise ValueError(f"question {question.index} is a conversation: set chat_template = true")
        return config.template.replace(PROMPT_SLOT, question.text)
    return chat_text(tokenizer, [asdict(message) for message in chat_messages(question, config)])


def chat_messages(question: Question, config: TaskConfig) -> tuple[Message, ...]:
    """The conversation for the chat template: the question's, with `system` and `template`; empty without one."""
    if not config.chat_template:
        return ()
    *earlier, last = question.messages or (Message("user", question.text),)
    messages = (*earlier, Message(last.role, config.template.replace(PROMPT_SLOT, last.content)))
    if config.system and messages[0].role != "system":
        return (Message("system", config.system), *messages)
    return messages


def check_template(config: TaskConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError if `config` needs a chat template and it fails on a plain question."""
    if config.chat_template:
        prompt_text(Question(0, "?", (), {}, config.task_name), config, tokenizer)


def _sampling(config: TaskConfig, tokenizer: Tokenizer, plain_agents: bool) -> Sampling:
    templated = not plain_agents if config.environment == AGENT else config.chat_template
    # One seed for the run; engines combine it with the trajectory's id and the position.
    return Sampling(
        temperature=float(config.temperature),
        top_p=float(config.top_p),
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=turn_ends(tokenizer) if templated else stop_tokens(tokenizer),
        seed=config.seed,
        stop_strings=config.stop,
    )
