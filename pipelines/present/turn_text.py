"""The turns of an agent's episode as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra.escaping import escape_to_one_line
from pipelines.inspect.log.turns import EpisodeTurns, TurnNode

MAX_CHARACTERS = 60


def turn_lines(found: EpisodeTurns) -> Iterator[str]:
    """Yield a summary, and a line for each turn: branches are indented below the turn that they continue."""
    times = found.times
    yield (
        f"turns: {len(found.turns)}; {times.model:.2f} s in requests, {times.agent:.2f} s between them (tools), "
        f"{times.waiting:.2f} s before the first"
    )
    for node in found.turns:
        yield _line(node)


def _line(node: TurnNode) -> str:
    after = "new conversation" if node.after is None else f"after {node.after}"
    took = "not answered" if node.seconds is None else f"{node.response_tokens} drawn in {node.seconds:.2f} s"
    ending = "" if node.finish_reason in (None, "stop") else f" ({node.finish_reason}{_because(node)})"
    asked = " ".join(f"[{_cut(each.get('role'))}] {_cut(each.get('content'))}" for each in node.messages[-1:])
    indent = "  " * node.depth
    tokens = f"{node.context_tokens}+{node.new_tokens} tokens, {took}{ending}"
    return f"  {node.number:>3} {node.start_s:>8.3f} s  {indent}{after}: {tokens}  {asked}{_answer(node)}".rstrip()


def _because(node: TurnNode) -> str:
    return f": {_cut(node.error)}" if node.error else ""


def _answer(node: TurnNode) -> str:
    if node.response is None:
        return "" if node.trained or node.seconds is None else "  (not trained)"
    calls = [_call(call) for call in node.response.get("tool_calls") or ()]
    return f" → {', '.join(calls) if calls else _cut(node.response.get('content'))}"


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f"{_cut(function.get('name'))}({_cut(function.get('arguments'))})"


def _cut(content: Any) -> str:
    text = escape_to_one_line(" ".join(str(content or "").split()))
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
