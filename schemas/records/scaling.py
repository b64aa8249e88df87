"""Decisions of the autoscaler about the number of rollout processes, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """From now on the run has `target` rollout processes; before it was `before`, of which `running` generate.

    Written by the autoscaler; read by the autoscaler, which carries it out, by `laminar run`, whose processes follow
    the newest one, and by people. Decisions are numbered from 1. Each names the whole number of processes, so nothing
    changes if one is carried out twice. `policy` is the policy's name, `reason` a text for people. A `dry_run` is not
    carried out.
    """

    number: int
    policy: str
    running: int
    before: int
    target: int
    reason: str
    dry_run: bool
    decided_at: int


@dataclass(frozen=True, slots=True)
class ScalingOutcome:
    """What became of decision `number`, which `actuator` carries out.

    Written by the autoscaler, for people. Without an `error` as many processes as decided generate, `seconds` after
    the decision was read. With one the actuator has failed, and tries again; `running` processes generate.
    """

    number: int
    actuator: str
    running: int
    error: str
    seconds: float
    ended_at: int
