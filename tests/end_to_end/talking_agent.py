"""An agent that takes two turns in one conversation, and one in another, which has a reward of its own.

It reports once the file that the variable LAMINAR_TEST_HOLD names, if any, is gone.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def talk(client: Any, task: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    aside = client.chat.completions.create(
        model="laminar", messages=[{"role": "user", "content": "aside"}], max_tokens=2
    )
    longest_s = time.monotonic() - began
    assert aside.usage.completion_tokens <= 2
    messages = [{"role": "user", "content": task["text"]}]
    drawn, texts = 0, []
    for _ in range(2):
        began = time.monotonic()
        response = client.chat.completions.create(model="laminar", messages=messages, max_tokens=6)
        longest_s = max(longest_s, time.monotonic() - began)
        texts.append(response.choices[0].message.content)
        drawn += response.usage.completion_tokens
        messages += [response.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": " and "}]
    while (hold := os.environ.get("LAMINAR_TEST_HOLD")) and Path(hold).exists():
        time.sleep(0.05)
    reward = float(drawn % 3)
    seen = {"drawn": drawn, "aside": aside.usage.completion_tokens, "reward": reward}
    seen |= {"texts": texts, "longest_s": longest_s}
    return {"answer": json.dumps(seen), "reward": reward, "rewards": {aside.id: 0.25}}
