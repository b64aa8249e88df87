"""Valid and faulty environments for tests; worker processes import this file."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class Echo:
    """Observes the number of turns and a checksum of all texts; done after `turns`; the reward grows by turn."""

    stop = ()

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    def reset(self, prompt: dict[str, Any]) -> str:
        self._texts: list[str] = []
        return f"[{prompt['number']}]"

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._texts.append(text)
        # The observation depends on all earlier texts, so another past gives another observation.
        checksum = sum(map(ord, "".join(self._texts))) % 1000
        return f"({len(self._texts)}:{checksum})", len(self._texts) * 0.25, len(self._texts) >= self._turns, {}


class Stopped(Echo):
    """As Echo, but a turn ends at one of these characters."""

    stop = ("A", "K", "Z")


class Waits(Echo):
    """Each step waits until the file named by the reference exists."""

    def reset(self, prompt: dict[str, Any]) -> str:
        self._file = prompt["reference"].get("file")
        return super().reset(prompt)

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        while self._file and not os.path.exists(self._file):
            time.sleep(0.01)
        return super().step(text)


class DiesOnce(Echo):
    """Its process is killed in the second turn, unless the file named by the reference exists."""

    def reset(self, prompt: dict[str, Any]) -> str:
        self._file = prompt["reference"]["file"]
        return super().reset(prompt)

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self._texts and not os.path.exists(self._file):
            with open(self._file, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)


class Faulty:
    """Fails as `how` says, in its first step or in its reset."""

    def __init__(self, how: str) -> None:
        self._how = how

    def reset(self, prompt: dict[str, Any]) -> Any:
        if self._how == "resets to nothing":
            return None
        if self._how == "raises at reset":
            raise RuntimeError("no game today")
        return "."

    def step(self, text: str) -> Any:
        match self._how:
            case "raises":
                raise KeyError("no such thing")
            case "exits":
                raise SystemExit(0)
            case "hangs":
                time.sleep(3600)
            case "loops":
                while True:
                    pass
            case "kills itself":
                os.kill(os.getpid(), signal.SIGKILL)
            case "returns 100 MB":
                return "x" * 100_000_000, 0.0, False, {}
            case "allocates 1 TB":
                return str(len(bytearray(10**12))), 0.0, False, {}
            case "starts a process":
                os.system("true")
            case "returns too little":
                return "0", 0.0
            case "returns no text":
                return b"a", 0.0, False, {}
            case "returns an unpaired surrogate":
                return "\ud800", 0.0, False, {}
            case "rewards with text":
                return "0", "1", False, {}
            case "rewards with NaN":
                return "0", float("nan"), False, {}
            case "rewards too much":
                return "0", 1.7e308, False, {}
            case "returns done as 1":
                return "0", 0.0, 1, {}
            case "returns info as a list":
                return "0", 0.0, False, []
            case "returns an empty observation":
                return "", 0.0, False, {}
        return "0", 0.0, True, {}


class Nondeterministic(Echo):
    """Not deterministic: the observation depends on the process."""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        _, reward, done, info = super().step(text)
        return f"<{os.getpid()}>", reward, done, info


class Independent:
    """Independent steps; the observation has the number of steps, which skipped turns do not increase."""

    independent = True

    def reset(self, prompt: dict[str, Any]) -> str:
        self._steps = 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._steps += 1
        return f"({text}:{self._steps})", float(text == "end"), text == "end", {}


class NoSteps:
    def reset(self, prompt: dict[str, Any]) -> str:
        return ""


class StopIsAString(Echo):
    stop = "no"  # type: ignore[assignment]
