"""A game of two agents, both of them the model: the first adds two numbers, the second adds a third to its answer.

Each has a conversation of its own, so the episode has two branches: `gateway.branches = "all"` trains both with the
reward of the team: half for a right first sum, half for a right second one.
"""

from __future__ import annotations

import re
from typing import Any


def solve(client: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Play one episode with a client of the package openai."""
    first, *rest = [int(number) for number in re.findall(r"\d+", task["text"])]
    total, carried, right = first, first, 0
    for number in rest:
        total += number
        answer = ask(client, f"{carried}+{number}=")
        if answer is None:
            break
        right += answer == carried + number
        carried = answer
    return {"answer": f"#{carried}", "reward": right / len(rest)}


def ask(client: Any, question: str) -> int | None:
    """The number that the model answers; None if it answers none."""
    messages = [{"role": "user", "content": question}]
    response = client.chat.completions.create(model="laminar", messages=messages, max_tokens=48)
    found = re.findall(r"\d+", (response.choices[0].message.content or "").rpartition("#")[2])
    return int(found[0]) if found and len(found[0]) < 10 else None
