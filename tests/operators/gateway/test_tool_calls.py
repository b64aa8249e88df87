"""Tool calls by the formats of the model families, and stop strings at the end of a text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from operators.gateway.chat_api import streamable_text
from operators.gateway.play import TurnOptions
from operators.gateway.tool_calls import cut_at_stop, parse_response, possible_stop

TOOLS = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "get"}}]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", {"a": 1})]),
        (
            'Let me see.<tool_call>{"name":"add","arguments":{}}</tool_call>'
            '<tool_call>{"name":"get","arguments":{"k":[1]}}</tool_call>',
            "Let me see.",
            [("add", {}), ("get", {"k": [1]})],
        ),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]', "", [("add", {"a": 2})]),
        ('<|python_tag|>{"name": "get", "parameters": {"k": 3}}', "", [("get", {"k": 3})]),
        ('{"name": "add", "parameters": {}}', "", [("add", {})]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("add", {"a": "</tool_call>"})],
        ),
    ],
)
def test_calls_are_parsed_by_family(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    parsed = parse_response(text, TOOLS, "turn")
    assert parsed.content == content
    found = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in parsed.tool_calls]
    assert found == calls
    assert parsed == parse_response(text, TOOLS, "turn")
    assert {each["id"] for each in parsed.tool_calls}.isdisjoint(
        each["id"] for each in parse_response(text, TOOLS, "other").tool_calls
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{bad}</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "add"',
        "[TOOL_CALLS] none",
        '{"answer": 3}',
        '{"name": ["add"], "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": ' + "[" * 50_000 + "}</tool_call>",
        '{"name": "add", "arguments": ' + "[" * 100 + "]" * 100 + "}",
        "<tool_call>{" * 50_000,
        "<tool_call>{}" * 50_000,
        "<tool_call>" + " " * 100_000 + "{",
        "<tool_call>" + "} " * 100_000,
        "plain",
    ],
)
def test_malformed_calls_stay_in_the_content(text: str) -> None:
    assert parse_response(text, TOOLS) == (text, [])


def test_without_tools_all_text_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse_response(text, []) == (text, [])


def test_text_is_cut_at_the_first_stop_string() -> None:
    assert cut_at_stop("a</x>b</y>", ["</y>", "</x>"]) == "a"
    assert cut_at_stop("a", ["</y>"]) == "a"
    assert [possible_stop(text, ["</x>"]) for text in ("a", "a<", "a</", "a</x", "a</x>")] == [0, 1, 2, 3, 0]


def test_streamed_text_ends_before_a_stop_string() -> None:
    form: Any = SimpleNamespace(text_of="".join)
    turn = TurnOptions("t", "d", 9, ("</x>",))
    assert [streamable_text(form, turn, [text]) for text in ("a<b</", "a</x>", "a</x>b<")] == ["a<b", "a", "a"]
