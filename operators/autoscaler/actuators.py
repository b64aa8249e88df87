"""Actuators: who starts and ends rollout processes. `apply` asks for the number of processes that a decision names.

An actuator gets the whole number, never a difference, and asking twice changes nothing. So a decision may be carried
out again: after a restart, and when others have changed the number. Processes that end drain themselves, see
`rollout.termination_notice_s`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Protocol

from schemas.records import ScalingDecision

MAX_OUTPUT = 500
"""Characters of a failed command's output in its error."""


class ActuatorFailed(RuntimeError):
    """A decision could not be carried out. The message says why, and what to do."""


class Actuator(Protocol):
    """Carries out decisions. Part of the graph, so it is a plain value."""

    @property
    def name(self) -> str: ...

    def apply(self, decision: ScalingDecision, machines: Sequence[str], timeout_s: float) -> None:
        """Ask for `decision.target` processes; new ones start soonest on the first of `machines`.

        Raises ActuatorFailed.
        """


@dataclass(frozen=True)
class LocalFleet:
    """`laminar run` on this machine reads the decisions itself, so there is nobody to ask."""

    name: str = "local"

    def apply(self, decision: ScalingDecision, machines: Sequence[str], timeout_s: float) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Command:
    """A user's program, which gets the decision of run `run` in its environment."""

    run: str
    command: Sequence[str]
    name: str = "command"

    def apply(self, decision: ScalingDecision, machines: Sequence[str], timeout_s: float) -> None:
        """Run the program and wait for its end. Raises ActuatorFailed if it fails, or takes too long."""
        environment = {
            **os.environ,
            "LAMINAR_RUN": self.run,
            "LAMINAR_DECISION": str(decision.number),
            "LAMINAR_BEFORE": str(decision.before),
            "LAMINAR_TARGET": str(decision.target),
            "LAMINAR_REASON": decision.reason,
            "LAMINAR_MACHINES": " ".join(machines),
        }
        try:
            with TemporaryFile() as out, TemporaryFile() as err:  # not pipes: a child that it leaves may keep them open
                code = subprocess.run(
                    [*self.command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    timeout=timeout_s,
                    check=False,
                ).returncode
                output = _end_of(err) or _end_of(out) or "without output"
        except subprocess.TimeoutExpired as error:
            raise ActuatorFailed(
                f"{self.command[0]} did not end in {timeout_s:g} s (autoscaling.actuator_timeout_s)"
            ) from error
        except OSError as error:  # of the program, or of the file for its output
            raise ActuatorFailed(
                f"autoscaling.command {self.command[0]!r} cannot be run: {error.strerror} ({error.filename})"
            ) from error
        if code:
            raise ActuatorFailed(f"{self.command[0]} exited with code {code}: {output}")


def _end_of(file: IO[bytes]) -> str:
    """The last MAX_OUTPUT characters of `file`, however much it has."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * MAX_OUTPUT))
    return file.read(4 * MAX_OUTPUT).decode(errors="replace").strip()[-MAX_OUTPUT:]
