"""The machines on which a new rollout would start soonest: those whose relays have the newest weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from schemas.records import PolicyVersion, RelayStatus, ReplicaStatus

MAX_MACHINES = 64
"""Machines that are named to an actuator, at most."""
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,253}")
"""What a machine is called: names get into the environment of a user's program."""


class Machines:
    """Folds heartbeats. A relay or a replica without one for `timeout_s` seconds is gone."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._relays: dict[int, tuple[RelayStatus, float]] = {}
        self._hosts: dict[int, tuple[str, float]] = {}

    def record(self, record: Any, now: float) -> None:
        """Fold one record that was received at `now`, in monotonic seconds."""
        match record:
            case RelayStatus():
                self._relays[record.relay] = record, now
            case ReplicaStatus():
                self._hosts[record.replica] = record.host, now

    def nearest(self, now: float) -> Sequence[str]:
        """The machines with the newest version that any has, those with the fewest replicas first."""
        held: dict[str, PolicyVersion] = {}
        for status, at in self._relays.values():
            if now - at <= self._timeout_s and status.versions and _NAME.fullmatch(status.host):
                newest = PolicyVersion.parse(status.versions[0])
                held[status.host] = max(newest, held.get(status.host, newest))
        replicas = Counter(host for host, at in self._hosts.values() if now - at <= self._timeout_s)
        version = max(held.values(), default=None)
        machines = [host for host, newest in held.items() if newest == version]
        return sorted(machines, key=lambda host: (replicas[host], host))[:MAX_MACHINES]
