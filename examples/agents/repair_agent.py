"""A coding agent: it reads and writes the files of a small repository and runs its tests, in the sandbox.

The task's reference has `files` (path to text) and `tests` (path to text). What the model writes runs in the sandbox
only, where it has no network and none of this user's files. The reward is 1 if the tests pass at the end; the model's
changes to them do not count.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from infra.sandbox.run import Limits, run_python

MAX_TURNS = 8
MAX_OUTPUT = 2000
SYSTEM = "Repair the repository so that its tests pass. Read the files, change them, and run the tests. Then say DONE."


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {each: {"type": "string", "description": text} for each, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("list_files", "The paths of all files."),
    _tool("read_file", "The text of a file.", path="its path"),
    _tool("write_file", "Replaces a file, or adds one.", path="its path", text="its new text"),
    _tool("run", "Runs a Python program in the repository's folder and returns its output.", program="the program"),
    _tool("run_tests", "Runs the tests and returns their output."),
]
RUN = """
import os, runpy, sys
files = {files!r}
for path, text in files.items():
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
sys.path.insert(0, "")
{program}
"""
RUN_TESTS = """
for path in {tests!r}:
    for name, test in sorted(runpy.run_path(path).items()):
        if name.startswith("test"):
            test()
print("{passed}")
"""


class Repository:
    """The files that the agent works on, and the tests, which it cannot change."""

    def __init__(self, files: dict[str, str], tests: dict[str, str], seconds: float = 5.0) -> None:
        self.files, self.tests = dict(files), dict(tests)
        self._limits = Limits(seconds=seconds)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a tool; errors are results too."""
        path = str(arguments.get("path", ""))
        match name:
            case "list_files":
                return "\n".join(sorted({**self.files, **self.tests}))
            case "read_file":
                return {**self.files, **self.tests}.get(path, f"there is no file {path}")
            case "write_file":
                if path.startswith("/") or ".." in path.split("/") or not path:
                    return "the path must be within the repository"
                self.files[path] = str(arguments.get("text", ""))
                return "written"
            case "run":
                return self.run(str(arguments.get("program", "")))
            case "run_tests":
                return self.run_tests()[1]
        return f"there is no tool {name}"

    def run(self, program: str) -> str:
        """The output of `program` in the repository's folder."""
        text = RUN.format(files={**self.files, **self.tests}, program=program)
        result = run_python(text, limits=self._limits)
        output = (result.output + result.errors).decode(errors="replace")
        return output[-MAX_OUTPUT:] or "(no output)"

    def run_tests(self) -> tuple[bool, str]:
        """Whether the tests pass, and their output. A word that the files do not know says so."""
        passed = f"all tests passed {secrets.token_hex(8)}"
        output = self.run(RUN_TESTS.format(tests=sorted(self.tests), passed=passed))
        return output.rstrip().endswith(passed), output.replace(passed, "all tests passed")


def solve(client: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Play one episode with a client of the package openai."""
    repository = Repository(task["reference"]["files"], task["reference"]["tests"])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["text"]}]
    for _ in range(MAX_TURNS):
        response = client.chat.completions.create(model="laminar", messages=messages, tools=TOOLS)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = repository.call(call.function.name, arguments_of(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    passed, output = repository.run_tests()
    return {"answer": output, "reward": float(passed)}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; none if they are not valid JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
