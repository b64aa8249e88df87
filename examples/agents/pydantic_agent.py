"""An agent of the harness pydantic-ai, unchanged: it reads OPENAI_BASE_URL and OPENAI_API_KEY.

[agents]
command = [".venv-agents/bin/python", "examples/agents/pydantic_agent.py"]
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def main() -> None:
    """Answer the task with a calculator, and report."""
    task = json.loads(Path(os.environ["LAMINAR_TASK_FILE"]).read_text())
    agent = Agent(OpenAIChatModel("laminar", provider=OpenAIProvider()), instructions="Use the tool. Answer #NUMBER.")

    @agent.tool_plain
    def add(numbers: list[int]) -> int:
        """Add numbers."""
        return sum(numbers)

    answer = agent.run_sync(task["text"]).output
    right = answer.rpartition("#")[2].strip() == str(task["reference"]["answer"])
    Path(os.environ["LAMINAR_REPORT"]).write_text(json.dumps({"answer": answer, "reward": float(right)}))


if __name__ == "__main__":
    main()
