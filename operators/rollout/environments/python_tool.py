"""Python as a tool: the model writes `<python>print(12 * 7)</python>` and reads `<output>84</output>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.sandbox.run import Limits, run_python
from operators.rollout.environments.answers import is_correct, last_call

_ENDINGS = {
    "time": "it took longer than {seconds:g} s",
    "output": "it wrote more than {letters} letters",
    "disk": "its files are too large",
    "threads": "it started more than {threads} threads",
    "killed": "it was killed",
}


class PythonTool:
    """Each program runs in a sandbox of its own (see infra/sandbox), for `seconds` at most; nothing is left of it.

    What it prints is observed, the last `letters` of its errors where it fails. A turn without a call is the answer:
    what follows its last `#` earns 1 if the reference has it, else 0. Raises SandboxUnavailable where programs cannot
    be confined.
    """

    stop = ("</python>",)
    starts_processes = independent = True

    def __init__(self, seconds: float = 4.0, memory_mb: int = 512, letters: int = 2000) -> None:
        self._limits, self._letters = Limits(seconds=seconds, memory_mb=memory_mb), letters

    def reset(self, prompt: Mapping[str, Any]) -> str:
        self._reference = prompt["reference"]
        return ""

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        program = last_call(text, "python")
        if program is None:
            return "", float(is_correct(text, self._reference)), True, {}
        ran = run_python(program, limits=self._limits)
        if ran.ended == "exited" and ran.status == 0:
            said = ran.output.decode(errors="replace")[: self._letters].strip()
            return f"<output>{said}</output>", 0.0, False, {}
        why = _ENDINGS.get(ran.ended, "").format(
            seconds=self._limits.seconds, letters=self._limits.output_bytes, threads=self._limits.threads
        )
        why = why or ran.errors.decode(errors="replace")[-self._letters :].strip()
        return f"<error>{why}</error>", 0.0, False, {"ended": ran.ended}
