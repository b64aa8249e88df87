"""An agent that takes two turns in one conversation, and one in another, which has a reward of its own."""

from __future__ import annotations

import json
from typing import Any


def talk(client: Any, task: dict[str, Any]) -> dict[str, Any]:
    aside = client.chat.completions.create(
        model="laminar", messages=[{"role": "user", "content": "aside"}], max_tokens=2
    )
    assert aside.usage.completion_tokens <= 2
    messages = [{"role": "user", "content": task["text"]}]
    drawn = 0
    for _ in range(2):
        response = client.chat.completions.create(model="laminar", messages=messages, max_tokens=6)
        drawn += response.usage.completion_tokens
        messages += [response.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": " and "}]
    reward = float(drawn % 3)
    seen = {"drawn": drawn, "aside": aside.usage.completion_tokens, "reward": reward}
    return {"answer": json.dumps(seen), "reward": reward, "rewards": {aside.id: 0.25}}
