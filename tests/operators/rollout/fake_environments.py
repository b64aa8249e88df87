"""Environments for tests, good ones and others, by the class that a test names; worker processes import this file."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class Echo:
    """Observes how many turns there were and how long the text was; is done after `turns`; earns the turn's number."""

    stop = ()

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    def reset(self, prompt: dict[str, Any]) -> str:
        self._seen: list[str] = []
        return f"[{prompt['number']}]"

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._seen.append(text)
        # What it has heard so far stands in what it says: another past is another observation.
        heard = sum(map(ord, "".join(self._seen))) % 1000
        return f"({len(self._seen)}:{heard})", len(self._seen) * 0.25, len(self._seen) >= self._turns, {}


class Stopped(Echo):
    """As Echo, but a turn ends at one of these letters."""

    stop = ("A", "K", "Z")


class Waits(Echo):
    """Answers once a file is there, whose name the reference gives."""

    def reset(self, prompt: dict[str, Any]) -> str:
        self._file = prompt["reference"].get("file")
        return super().reset(prompt)

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        while self._file and not os.path.exists(self._file):
            time.sleep(0.01)
        return super().step(text)


class DiesOnce(Echo):
    """Its process is killed in the second turn, unless there is a file, whose name the reference gives."""

    def reset(self, prompt: dict[str, Any]) -> str:
        self._file = prompt["reference"]["file"]
        return super().reset(prompt)

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self._seen and not os.path.exists(self._file):
            with open(self._file, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)


class Bad:
    """Does what `how` says, in its first step or in its reset."""

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
            case "spins":
                while True:
                    pass
            case "kills itself":
                os.kill(os.getpid(), signal.SIGKILL)
            case "says 100 MB":
                return "x" * 100_000_000, 0.0, False, {}
            case "eats memory":
                return str(len(bytearray(10**12))), 0.0, False, {}
            case "starts a process":
                os.system("true")
            case "returns too little":
                return "0", 0.0
            case "returns no text":
                return b"a", 0.0, False, {}
            case "returns half a letter":
                return "\ud800", 0.0, False, {}
            case "rewards with text":
                return "0", "1", False, {}
            case "rewards with NaN":
                return "0", float("nan"), False, {}
            case "is done by 1":
                return "0", 0.0, 1, {}
            case "informs in a list":
                return "0", 0.0, False, []
            case "says nothing":
                return "", 0.0, False, {}
        return "0", 0.0, True, {}


class Forgetful(Echo):
    """Not deterministic: says something else in every process."""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        _, reward, done, info = super().step(text)
        return f"<{os.getpid()}>", reward, done, info


class Independent:
    """Every step by itself; tells how many it has heard, which is what a turn that is not played again does not add."""

    independent = True

    def reset(self, prompt: dict[str, Any]) -> str:
        self._heard = 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._heard += 1
        return f"({text}:{self._heard})", float(text == "end"), text == "end", {}


class NoSteps:
    def reset(self, prompt: dict[str, Any]) -> str:
        return ""


class ListensToAString(Echo):
    stop = "no"  # type: ignore[assignment]
