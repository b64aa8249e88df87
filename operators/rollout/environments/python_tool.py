"""Python as a tool: the model writes `<python>print(12 * 7)</python>` and reads `<output>84</output>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.sandbox.run import Limits, run_python
from operators.rollout.environments.answers import is_correct, last_call
from operators.rollout.environments.config import PYTHON_SECONDS

_ENDINGS = {
    "time": "it took longer than {seconds:g} s",
    "output": "it wrote more than {output_bytes} bytes",
    "disk": "its files are too large",
    "threads": "it started more than {threads} threads",
    "killed": "it was killed",
}


class PythonTool:
    """Each program runs in a sandbox of its own (see infra/sandbox) for at most `seconds`, and leaves no files.

    The observation is its output, or if it fails its errors, at most `output_chars` characters. A turn without a call
    is the answer: the reward is 1 if the text after its last `#` is the reference's, else 0. Raises SandboxUnavailable
    if programs cannot be confined.
    """

    stop = ("</python>",)
    starts_processes = independent = True

    def __init__(self, seconds: float = PYTHON_SECONDS, memory_mb: int = 512, output_chars: int = 2000) -> None:
        self._limits, self._output_chars = Limits(seconds=seconds, memory_mb=memory_mb), output_chars

    def reset(self, prompt: Mapping[str, Any]) -> str:
        self._reference = prompt["reference"]
        return ""

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        program = last_call(text, "python")
        if program is None:
            return "", float(is_correct(text, self._reference)), True, {}
        result = run_python(program, limits=self._limits)
        if result.ended == "exited" and result.status == 0:
            output = result.output.decode(errors="replace")[: self._output_chars].strip()
            return f"<output>{output}</output>", 0.0, False, {}
        reason = _ENDINGS.get(result.ended, "").format(
            seconds=self._limits.seconds, output_bytes=self._limits.output_bytes, threads=self._limits.threads
        )
        reason = reason or result.errors.decode(errors="replace")[-self._output_chars :].strip()
        return f"<error>{reason}</error>", 0.0, False, {"ended": result.ended}
