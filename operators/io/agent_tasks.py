"""The task of an agent, as it gets it in LAMINAR_TASK or from the gateway."""

from __future__ import annotations

import json
from typing import Any

from schemas.records import Prompt


def task_of(prompt: Prompt, member: int) -> dict[str, Any]:
    """The task of sample `member` of `prompt`, JSON-ready."""
    return {
        "text": prompt.text,
        "task": prompt.task,
        "number": prompt.number,
        "member": member,
        "purpose": prompt.purpose,
        "reference": json.loads(prompt.reference),
    }
