"""The task of an agent, as it gets it in LAMINAR_TASK_FILE or from the gateway."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from schemas.records import Prompt


def task_of(prompt: Prompt, member: int) -> dict[str, Any]:
    """The task of sample `member` of `prompt`, JSON-ready.

    Of a conversation `messages` has all its messages and `text` the last one's: the gateway applies the chat template.
    """
    messages = [asdict(each) for each in prompt.messages]
    return {
        "text": messages[-1]["content"] if messages else prompt.text,
        "messages": messages,
        "task": prompt.task,
        "number": prompt.number,
        "member": member,
        "purpose": prompt.purpose,
        "reference": json.loads(prompt.reference),
    }
