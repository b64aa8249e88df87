"""Tool calls from drawn tokens to the next request, with published chat templates and the real tokenizer."""

from __future__ import annotations

import json

import pytest
from published_templates import MARKS, WITH_TOOLS, tokenizer

from infra.models.conversations import ConversationFormat, TemplateError
from operators.gateway.chat_api import response_message
from operators.gateway.conversation import (
    RecordedConversations,
    RecordedPrefix,
    digests_of,
    plan_turn,
    response_digest,
)
from operators.gateway.play import TurnOptions
from schemas.records import TokenRange

QUESTION = {"role": "user", "content": "What is 1+1?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TURN = TurnOptions("turn", "digest", 100, (), json.dumps(TOOLS))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_drawn_calls_are_parsed_and_results_are_rendered(name: str) -> None:
    template, end, call = WITH_TOOLS[name]
    form = ConversationFormat(tokenizer(template, end, MARKS.get(name, ())), plain=False)
    drawn = form.tokenizer.encode(call + end, add_special_tokens=False)
    said = response_message(form, TURN, drawn)
    (made,) = said["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})
    assert said["content"] == ("I add." if name == "hermes" else None)
    result = {"role": "tool", "tool_call_id": made["id"], "content": "7777"}
    following = form.tokenizer.decode(form.next_tokens([QUESTION, said, result], TOOLS, 2, drawn[-1]))
    assert following.count("7777") == 1
    assert "add" not in following
    assert "add" in form.tokenizer.decode(form.first_tokens([QUESTION, said, result], TOOLS))  # at another branch


def test_calls_that_the_template_rejects_end_no_conversation() -> None:
    """The template renders only one call a message, but the recorded tokens are used: it need not render this one."""
    template, end, _ = WITH_TOOLS["llama3.1"]
    form = ConversationFormat(tokenizer(template, end, MARKS["llama3.1"]), plain=False)
    drawn = form.tokenizer.encode(2 * WITH_TOOLS["qwen2.5"][2] + end, add_special_tokens=False)
    said = response_message(form, TURN, drawn)
    results = [{"role": "tool", "tool_call_id": made["id"], "content": "7777"} for made in said["tool_calls"]]
    ranges = (TokenRange(0, 9),)
    digest = response_digest(digests_of([QUESTION], TOOLS)[-1], said)
    recorded = RecordedConversations(responses={digest: RecordedPrefix(ranges, drawn[-1])})
    plan = plan_turn([QUESTION, said, *results], TOOLS, recorded, form)
    assert (plan.context, plan.rewritten) == (ranges, True)
    assert form.tokenizer.decode(plan.token_ids).count("7777") == 2
    with pytest.raises(TemplateError, match="single tool-calls"):
        form.first_tokens([QUESTION, said, *results], TOOLS)


def test_text_without_a_call_has_no_special_tokens() -> None:
    template, end, _ = WITH_TOOLS["mistral"]
    form = ConversationFormat(tokenizer(template, end, MARKS["mistral"]), plain=False)
    drawn = form.tokenizer.encode("[TOOL_CALLS] none" + end, add_special_tokens=False)
    assert response_message(form, TURN, drawn) == {"role": "assistant", "content": " none"}
