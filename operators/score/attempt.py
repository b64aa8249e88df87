"""The input of verifiers: the attempt, and how the answer is extracted from its text."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from infra.json_text import decode_json

AnswerKind = Literal["marker", "regex", "boxed", "fenced", "whole"]
_FENCE = "```"
_BOXES = ("\\boxed", "\\fbox")
_BRACES = re.compile("[{}]")


class Extraction(NamedTuple):
    """Where the answer is in a text.

    `marker`: after the last `pattern`. `regex`: the first group (or all) of the last match of `pattern`. `boxed`: in
    the last \\boxed{}. `fenced`: in the last block of ```, for programs. `whole`: the whole text. White space around an
    answer is removed.
    """

    kind: AnswerKind
    pattern: str = ""


class AnswerContext(NamedTuple):
    """What verifiers need of a trajectory, as JSON values: `reference` is JSON text, `tokens` the response's length.

    `environment` is the sum of the rewards of an environment's turns; None without an environment. `messages` has those
    of each conversation of an agent, as JSON text, and `reported` the agent's own reward of each, if it gave them.
    """

    text: str
    tokens: int
    prompt: str
    task: str
    reference: str
    environment: float | None = None
    messages: Sequence[str] = ()
    reported: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One response to judge: its text, its length in tokens (end of sequence included), and its prompt.

    `answer` is None if the text has none. `reference` is the prompt's, parsed from JSON; verifiers must not change it.
    `environment`, `messages` and `reported` are as in AnswerContext.
    """

    text: str
    answer: str | None
    tokens: int
    prompt: str
    task: str
    reference: Mapping[str, Any]
    environment: float | None = None
    messages: Sequence[str] = ()
    reported: Sequence[float] = ()

    @property
    def conversations(self) -> list[dict[str, Any]]:
        """The conversations of an agent, that of its last turn first: `messages` in the shape of OpenAI's API, None if
        they were too long to be recorded, and `reward`, the agent's own report, None without one."""
        rewards: Sequence[float | None] = self.reported or [None] * len(self.messages)
        return [
            {"messages": decode_json(text) if text else None, "reward": reward}
            for text, reward in zip(self.messages, rewards, strict=True)
        ]

    @property
    def accepted(self) -> list[str]:
        """The correct answers: the reference's `answer`, or each item of it if it is a list.

        Raises ValueError if the reference has none.
        """
        answer = self.reference.get("answer")
        if answer is None or answer == []:
            raise ValueError("the reference has no answer")
        return [str(item) for item in answer] if isinstance(answer, list) else [str(answer)]


def make_attempt(context: AnswerContext, reference: Mapping[str, Any], extraction: Extraction) -> Attempt:
    """The attempt of `context`, given its parsed `reference`. The answer is extracted here: a slow pattern blocks the
    process that judges the attempt alone."""
    parsed = {"reference": reference, "answer": extract_answer(context.text, extraction)}
    return Attempt(**context._asdict() | parsed)


def parse_reference(text: str) -> Mapping[str, Any]:
    """The reference in JSON `text`. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the reference is not a JSON object")
    return value


def extract_answer(text: str, extraction: Extraction) -> str | None:
    """The answer in `text`; None if there is none."""
    kind, pattern = extraction
    if kind == "whole":
        return text.strip()
    if kind == "marker":
        _, marker, answer = text.rpartition(pattern)
        return answer.strip() if marker else None
    if kind == "boxed":
        return _last_boxed(text)
    if kind == "fenced":
        return _last_fenced(text)
    matches = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
    found = matches[0][1 if matches[0].re.groups else 0] if matches else None
    return None if found is None else found.strip()


def _last_fenced(text: str) -> str | None:
    """The content of the last closed block of ```, without the name of the language."""
    parts = text.split(_FENCE)
    closed = (len(parts) - 1) // 2
    return parts[2 * closed - 1].partition("\n")[2].strip() if closed else None


def _last_boxed(text: str) -> str | None:
    """The content of the last box with balanced braces. The time is linear in the length of any text."""
    open_braces: list[int] = []
    start, content = -1, None
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif open_braces:
            opening = open_braces.pop()
            if opening > start and text.endswith(_BOXES, 0, opening):
                start, content = opening, text[opening + 1 : brace.start()].strip()
    return content
